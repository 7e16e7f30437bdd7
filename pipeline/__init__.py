"""What runs, and what is already done: recipe, stage graph, artifacts, runner, command line."""
