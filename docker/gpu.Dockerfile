# docker build -f docker/gpu.Dockerfile -t rlhfkit .
# devel: DeepSpeed compiles its optimizers with nvcc. The shared memory of a container is 64 MB; NCCL and Ray want more:
# docker run --gpus all --shm-size 16g rlhfkit rlhfkit doctor
# wget: KubeRay before 1.6 asks with it whether a pod is healthy.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap g++ git ninja-build python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/rlhfkit
ENV PATH=/opt/rlhfkit/bin:$PATH
COPY requirements/gpu.txt /tmp/
RUN pip install --no-cache-dir --no-deps -r /tmp/gpu.txt && pip install --no-cache-dir -c /tmp/gpu.txt "ray[default]"
COPY . /src
RUN pip install --no-cache-dir --no-deps /src
WORKDIR /work
