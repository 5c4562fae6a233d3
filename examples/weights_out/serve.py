"""A serving process beside a training: keeps a Llama of transformers equal to the trainer's and generates with it.

    serve.py CONFIG PATCHES --until STEP [--prompt TEXT]

Applies patches as they appear in the directory PATCHES, and after each writes how the model continues the prompt.
"""

import argparse
import pathlib
import sys
import time

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))
from fsdp_receiver import Receiver  # noqa: E402, a copy of this file is all that a serving system needs

END_TOKEN = 256  # after the 256 bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="config.json of the model")
    parser.add_argument("patches", help="the directory that the trainer writes patches to")
    parser.add_argument("--until", type=int, required=True, help="the step to end with")
    parser.add_argument("--prompt", default='"""A serv', help="text to continue; the default is how this file begins")
    given = parser.parse_args()
    config = transformers.LlamaConfig.from_json_file(given.config)
    model = transformers.LlamaForCausalLM(config).eval()
    receiver = Receiver(model)
    print("serving", flush=True)
    prompt = torch.tensor([[END_TOKEN, *given.prompt.encode()]])  # as after the end of a text
    while receiver.step is None or receiver.step < given.until:
        if applied := receiver.poll(given.patches):
            print(f"step {receiver.step}: {sum(patch.num_values for patch in applied):,} weights", flush=True)
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False,
                                    eos_token_id=END_TOKEN, pad_token_id=END_TOKEN)[0].tolist()
            print(f"    {bytes(token for token in tokens if token < END_TOKEN).decode(errors='replace')!r}", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
