# GPU (needs the NVIDIA container toolkit):
#   docker build -t llm-training-recipes .
#   docker run --rm -it --gpus all -p 8888:8888 llm-training-recipes
# CPU:
#   docker build -t llm-training-recipes --build-arg BASE=python:3.11-slim \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   docker run --rm -it -p 8888:8888 llm-training-recipes
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
FROM ${BASE}

# torch.compile needs a C++ compiler and the Python headers; make needs venv.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        build-essential python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# WORKDIR alone would create a folder that belongs to root.
RUN useradd --create-home reader && install --directory --owner=reader /home/reader/recipes
USER reader
WORKDIR /home/reader/recipes
COPY --chown=reader . .

# The same set-up as on a laptop: the GPU image's own PyTorch is found and reused.
ARG TORCH_INDEX=
RUN PIP_NO_CACHE_DIR=1 make .venv/.lab TORCH_INDEX=${TORCH_INDEX}

EXPOSE 8888
CMD ["make", "lab", "ARGS=--ip=0.0.0.0 --no-browser"]
