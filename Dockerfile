# The trainer in an image, for CPU, TPU or NVIDIA's GPUs:
#
#   docker build --build-arg EXTRAS=train,tpu -t zero .        # or train (CPU), train,cuda12, train,cuda13
#   docker run --rm -v "$PWD/zero:/zero" zero data.bucket_path=my-bucket
#   docker run --rm --gpus all --shm-size=8g -v "$PWD/zero:/zero" zero model.size=124m
#
# It resumes from the newest checkpoint, or starts. Status 75 says that it was stopped after a saved checkpoint: start it
# again. Data, runs and compiled programs are in /zero, which has to be writable for user 1000.
FROM python:3.12-slim

ARG EXTRAS=train
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY conf conf
COPY zero zero
# The plugins of accelerators are in no constraints: jax names their versions itself.
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" \
    && rm -rf /src \
    && useradd --uid 1000 --create-home zero \
    && install -d -o zero /zero

USER 1000
WORKDIR /zero
ENV JAX_COMPILATION_CACHE_DIR=/zero/.cache
# As process 1 a signal has no default action; zero-train handles SIGTERM and SIGINT from its first line on.
ENTRYPOINT ["zero-train", "--resume=auto"]
