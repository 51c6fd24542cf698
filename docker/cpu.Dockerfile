# docker build -f docker/cpu.Dockerfile -t rlhfkit-cpu .
# docker run --shm-size 2g rlhfkit-cpu rlhfkit demo
# wget: KubeRay before 1.6 asks with it whether a pod is healthy.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap g++ git wget \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/cpu.txt /tmp/
RUN pip install --no-cache-dir --no-deps -r /tmp/cpu.txt && pip install --no-cache-dir -c /tmp/cpu.txt "ray[default]"
COPY . /src
RUN pip install --no-cache-dir --no-deps /src
WORKDIR /work
