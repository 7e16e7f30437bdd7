"""Submitting recipes to Ray clusters (jobs, KubeRay, SLURM). Nothing is implemented here yet.

Joining an existing cluster (`sentray run --address ...`) is `pipeline/hosts.py`.
"""
