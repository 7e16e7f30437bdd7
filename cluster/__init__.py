"""A placeholder: submitting recipes to a Ray cluster (jobs, KubeRay, SLURM) is not there yet.

`sentray run --address HOST:PORT` joins a cluster that runs already: pipeline/run/session.py.
"""
