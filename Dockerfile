# The command fsdp with everything it needs, on CPUs:
#   docker build -t fsdp .
#   docker run --rm -v "$PWD/runs:/runs" fsdp train --data /opt/fsdp/docs --ranks 2 --steps 20 --checkpoint-dir /runs/first
# The parts of a machine come from the same script as everywhere else, tools/setup.sh. For GPUs, build on an image of CUDA's
# with FSDP_TORCH as docs/gpu.md says.
FROM debian:12-slim AS build
WORKDIR /opt/fsdp
# First what changes rarely, so that a change of the sources does not download libtorch again.
COPY tools/setup.sh tools/setup.sh
COPY requirements.txt requirements.txt
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates make git \
    && tools/setup.sh --torch \
    && rm -rf /var/lib/apt/lists/*
COPY . .
RUN tools/build.sh release --target fsdp_command

FROM debian:12-slim
# libgomp is libtorch's, Open MPI what mpirun needs between containers.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 openmpi-bin \
    && rm -rf /var/lib/apt/lists/*
# The command looks for libtorch where it was built with it.
COPY --from=build /opt/fsdp/.venv/lib /opt/fsdp/.venv/lib
COPY --from=build /opt/fsdp/build/release/bin/fsdp /usr/local/bin/fsdp
COPY --from=build /opt/fsdp/docs /opt/fsdp/docs
COPY --from=build /opt/fsdp/LICENSE /opt/fsdp/LICENSE
WORKDIR /work
ENTRYPOINT ["fsdp"]
CMD ["--help"]
