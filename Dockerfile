# watchkeeper with vLLM for CPU (linux/amd64).
#
#   docker build -t watchkeeper .                      the service; say a model: docker run watchkeeper serve MODEL ...
#   docker build -t watchkeeper:tiny --target tiny .   with a tiny random model in /models/tiny, as docker-compose.yml has it
FROM python:3.11-slim AS base

# libnuma1: vLLM's CPU kernels link to it. g++: torch compiles a model of your own for the CPU at its start.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 watchkeeper

WORKDIR /opt/watchkeeper
COPY requirements/cpu.txt requirements/cpu.txt
# torch alone comes from PyTorch's index: its CPU build is not on PyPI.
RUN pip install --no-cache-dir --no-deps --index-url https://download.pytorch.org/whl/cpu \
      "$(grep -oE '^torch==[^ ]+' requirements/cpu.txt)" \
 && pip install --no-cache-dir --no-deps -r requirements/cpu.txt

COPY pyproject.toml README.md LICENSE ./
COPY bus bus
COPY statemachine statemachine
COPY service service
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

USER 10001
WORKDIR /home/watchkeeper
# gRPC health, the OpenAI-compatible API, admin HTTP.
EXPOSE 50051 8000 9090
ENTRYPOINT ["watchkeeper"]
CMD ["--help"]


FROM base AS tiny
USER root
RUN mkdir /models && chown watchkeeper /models
USER 10001
RUN watchkeeper tiny-model /models/tiny --seed 0


FROM base AS watchkeeper
