"""What a run's lease tells others of how far it is."""

from types import SimpleNamespace

from pipeline.run.progress import Progress


def test_the_newest_line_of_any_node():
    quiet = SimpleNamespace(add=lambda *_: None, figures=lambda *_: None)
    progress = Progress(lambda line: None, quiet, quiet)
    assert progress.said_last() == ""
    for node, text in (("a", "1"), ("b", "2"), ("a", "3")):
        progress.say(node, text)
    assert progress.said_last() == "a: 3" and progress.said("b") == "2"
