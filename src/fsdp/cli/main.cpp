// The command `fsdp`. All of it is in the library beside this file, so that tests can call it
// without starting a program.
#include "fsdp/cli/command.h"

int main(int argc, char** argv) { return fsdp::cli::run(argc, argv); }
