"""What is computed: one room per stage. Nothing here imports the pipeline.

contract.py says what a stage is and what it is handed; builtin.py lists Sentray's own stages;
plugins.py reads those of other packages.
"""
