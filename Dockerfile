# An agent as PID 1: `docker run IMAGE train.py` is `torchelastic run train.py` (docs/guides/docker.md).
#
#   docker build -t torchelastic .
#   docker build -t torchelastic --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG TORCH="torch>=2.9"
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH" numpy

COPY pyproject.toml README.md LICENSE /tmp/torchelastic/
COPY src /tmp/torchelastic/src
RUN pip install --no-cache-dir "/tmp/torchelastic[kubernetes]" && rm -r /tmp/torchelastic

# Any user id works, also one without an entry in /etc/passwd: Python asks USER before that file,
# and HOME and the registry of jobs (below the temporary directory) are writable for everyone.
ENV HOME=/tmp USER=torchelastic
USER 10001:10001
WORKDIR /workspace

# The exec form: with a shell as PID 1, SIGTERM would not reach the agent.
ENTRYPOINT ["torchelastic", "run"]
CMD ["--help"]
