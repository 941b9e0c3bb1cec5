# An image with the package, Lightning and Accelerate:
#
#     docker build -t lightning-muon .
#     docker run --rm --gpus all --ipc=host lightning-muon doctor
#     docker run --rm --gpus all --ipc=host -v "$PWD:/work" lightning-muon fit --config FILE.yaml
#
# The wheel of torch on PyPI brings CUDA's libraries. --build-arg TORCH_INDEX=URL takes another index, such as
# PyTorch's of CPU wheels. --ipc=host: workers of a DataLoader send batches through shared memory.
FROM python:3.11-slim

ARG TORCH_INDEX=
WORKDIR /package
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY lightning_muon lightning_muon
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[accelerate,lightning]"

# Classes that a config file names are found from here.
WORKDIR /work
ENTRYPOINT ["lightning-muon"]
CMD ["--help"]
