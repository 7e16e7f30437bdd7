"""What runs, and what is already done. Knows no stage by name.

recipe/   what is asked: a YAML file, checked, with its lines in errors
plan/     what is planned: the graph of nodes, and why each one must be made
run/      how it runs: which node when, and where on Ray
store/    where it is stored: artifacts and the history of runs
report/   how it is told: figures, tables, pages, `sentray show`
cli.py    the command line
"""
