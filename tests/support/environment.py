"""Sets the environment of all tests, and of the processes that they start.

To be imported first: numpy and torch read some of it when they are imported.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Models of the tests are tiny, and two processes of pytest and all of Ray's share two cores:
# the threads of one that wait for each other take them from the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# for the S3 server on loopback; Ray's workers inherit them from the cluster started below
os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "loopback"
# how often Ray Train looks whether its workers are done (2 s)
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
# as many idle workers stay on a Ray node (else one for each core), with what they imported
os.environ.setdefault("RAY_num_workers_soft_limit", "3")
# DeepSpeed compiles an operator (30 s): once for this environment, not for each run of tests
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
