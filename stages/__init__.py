"""What is computed: one room per stage. Nothing here knows about recipes, artifacts or Ray."""
