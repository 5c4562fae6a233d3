#include "fsdp/comm/backends.h"

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/mpi/mpi_transport.h"

namespace fsdp {

bool mpi_available() { return true; }

std::unique_ptr<Communicator> connect_mpi(const Launch& launch, const CommOptions& options) {
  options.validate();
  std::shared_ptr<MpiTransport> transport = MpiTransport::shared();
  FSDP_CHECK(transport->size() == launch.size && transport->rank() == launch.rank,
             name_of(launch.launcher), " says rank ", launch.rank, " of ", launch.size,
             ", but MPI says rank ", transport->rank(), " of ", transport->size(),
             ": start the job with mpirun, or with srun --mpi=pmix if Slurm has it");
  return communicator_over(std::move(transport), options);
}

}  // namespace fsdp
