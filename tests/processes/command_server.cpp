// Runs commands of fsdp for tests in Python, each in a copy of this process, which has libtorch
// loaded already: a start of the program takes half a second. Reads a line of JSON for each,
// {"directory": d, "words": [...], "environment": ["NAME=value", ...]}, and answers with
// {"code": c, "out": text, "err": text}.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "processes/run_command.h"

int main() {
  using Words = std::vector<std::string>;
  for (std::string line; std::getline(std::cin, line);) {
    const auto asked = nlohmann::json::parse(line);
    const fsdp::test::CommandResult done = fsdp::test::run_fsdp_in(
        asked.at("directory").get<std::string>(), asked.at("words").get<Words>(),
        asked.at("environment").get<Words>());
    const nlohmann::json answer = {{"code", done.exit_code}, {"out", done.out}, {"err", done.err}};
    std::cout << answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  }
}
