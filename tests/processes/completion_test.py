#!/usr/bin/env python3
"""A shell completes the command with the script that the command prints: completion_test.py FSDP"""

import pathlib
import re
import shutil
import subprocess
import sys
import unittest

FSDP = pathlib.Path(sys.argv.pop(1))


def fsdp(*arguments):
    return subprocess.run([FSDP, *arguments], capture_output=True, text=True, timeout=60)


def completed(*words):
    """The words that bash offers for the last of these words after "fsdp"."""
    script = 'eval "$("$1" completion bash)"; shift; COMP_WORDS=(fsdp "$@"); COMP_CWORD=$#; _fsdp; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-uo", "pipefail", "-c", script, "bash", FSDP, *words], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split()


class Completion(unittest.TestCase):
    def test_offers_subcommands(self):
        self.assertEqual(completed("tr"), ["train"])
        self.assertIn("plan", completed(""))
        self.assertEqual(completed("data", "pa"), ["pack"])
        self.assertEqual(completed("data", "pack", "--outp"), ["--output"])

    def test_offers_every_option_of_the_help(self):
        for command in ("train", "plan", "convert", "inspect", "generate", "eval", "info"):
            help_of_all = "--help-all" if command == "train" else "--help"
            names = re.findall(r"^\s+(?:-\w,)?(--[a-z0-9-]+)", fsdp(command, help_of_all).stdout, re.MULTILINE)
            self.assertGreater(len(names), 1)
            self.assertEqual(set(names) - set(completed(command, "--")), set(), command)

    def test_offers_options_of_the_subcommand_alone(self):
        self.assertEqual(completed("plan", "--learn"), [])
        self.assertEqual(completed("plan", "--model", "x", "--fi"), ["--fit"])
        self.assertEqual(completed("train", "--no-quie"), ["--no-quiet"])
        # Values are left to the shell, which knows files.
        self.assertEqual(completed("train", "--data", "x"), [])

    def test_zsh_runs_the_same(self):
        script = fsdp("completion", "zsh").stdout
        self.assertTrue(script.startswith("autoload"))
        self.assertTrue(script.endswith(fsdp("completion", "bash").stdout))
        if shutil.which("zsh"):
            subprocess.run(["zsh", "-n"], input=script, text=True, check=True, timeout=60)

    def test_other_shells_are_answered_in_a_sentence(self):
        done = fsdp("completion", "powershell")
        self.assertEqual((done.returncode, done.stderr), (2, "fsdp: SHELL is 'powershell'; use one of bash, zsh.\n"))
        self.assertEqual(fsdp("completion").returncode, 2)


unittest.main(verbosity=2)
