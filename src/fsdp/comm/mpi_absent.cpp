// Stands in for connect_mpi.cpp in a build without MPI.
#include "fsdp/base/error.h"
#include "fsdp/comm/connect_mpi.h"

namespace fsdp {

bool mpi_available() { return false; }

std::unique_ptr<Communicator> connect_mpi(const Launch& launch, const CommOptions&) {
  throw Error(
      concat(name_of(launch.launcher), " started ", launch.size,
             " processes, but this build has no MPI: install libopenmpi-dev and openmpi-bin "
             "and build again with FSDP_MPI=ON"));
}

}  // namespace fsdp
