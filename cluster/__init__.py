"""Ray clusters: jobs submitted, watched, stopped, their results fetched; clusters as files.

`commands` is the command line of this package. A job runs the same `sentray run` or `sentray tune`
on the cluster's head as anybody would there.
"""
