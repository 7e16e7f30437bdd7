"""Files that start a recipe where nobody submits it: on Kubernetes (KubeRay), under SLURM; and
Ray's autoscaler file for machines of a cloud.

`settings` is the section `manifest` of a cluster's file. `kuberay`, `slurm` and `ray_up` each make
the files of one place from it and from the job's package (cluster/package.py). `folder` writes
them, and `make` is what the command calls.
"""
