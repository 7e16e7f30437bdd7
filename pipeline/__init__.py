"""What runs, and what is already done.

recipe/   what is asked: a YAML file, checked, with its lines in errors
plan/     what is planned: the graph of nodes, and why each one must be made
run/      how it runs: which node when, and where on Ray
store/    where it is stored: artifacts and the history of runs
report/   how it is told: figures, tables, pages, advice, `sentray show`
compare/  two runs, or encoders, side by side
new/      recipes for one's own text
upkeep/   what a storage holds, and what of it may go
cli.py    the command line

Nothing here has a list of stages. What is planned and told knows those that every recipe has
(sentences, training, tests, export) and what they say of themselves.
"""
