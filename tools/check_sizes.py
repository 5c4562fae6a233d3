#!/usr/bin/env python3
"""Reports files and functions that have grown too long to read.

    tools/check_sizes.py FILE...

Files over the aim are printed as a note: one idea of 600 lines reads better than three fragments. Functions have a limit, too:
over it they are printed, and the exit status is 1. C++ functions are found by their braces (the files are clang-formatted), Python ones by the parser.
"""

import ast
import pathlib
import re
import sys

FILE_AIM = 400
FUNCTION_AIM, FUNCTION_LIMIT = 60, 100

CPP = (".h", ".cpp", ".cu", ".cuh")

# Comments, strings and character literals: braces in them do not count. A raw string comes first, since
# a plain one would end at its inner quotes; a quote between digits is a separator (1'000).
NOISE = re.compile(
    r'R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'"
    r"|//[^\n]*|/\*.*?\*/",
    re.DOTALL)
PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
# Opens a scope that holds functions rather than being one.
SCOPE = re.compile(r"^\s*(template\s*<.*>\s*)?(inline\s+)?(namespace|extern|class|struct|union|enum)\b", re.DOTALL)
NAME = re.compile(r"(operator\s*[^\s\w(]+|[~\w:<>]+)\s*\(")
ACCESS = re.compile(r"\s*(public|protected|private):")


def blank(match):
    """Replaces a piece of text by as many line breaks as it had."""
    return "\n" * match.group(0).count("\n")


def function_name(head):
    """The name in a function's head; a test's name is its macro's arguments."""
    match = NAME.search(head)
    if not match:
        return None
    test = re.match(r"\s*(TEST|TEST_F|TEST_P|TYPED_TEST)\(([^)]*)\)", head)
    return f"{test.group(1)}({test.group(2)})" if test else match.group(1)


def cpp_functions(text):
    """Yields (name, first line, number of lines) of each function in a C++ file."""
    text = PREPROCESSOR.sub(blank, NOISE.sub(blank, text))
    scopes = []  # one entry per open brace: (name or None, first line), None for a scope of declarations
    head_start = 0
    inside = 0  # how many of the open braces are functions or inside one
    line = 1
    for position, char in enumerate(text):
        if char == "\n":
            line += 1
        elif char == "{":
            head = ACCESS.sub(blank, text[head_start:position])
            first = line - head.lstrip().count("\n")
            if inside:
                scopes.append((None, line))
                inside += 1
            elif SCOPE.match(head):
                scopes.append(None)
            else:  # a function, or an initializer, which has no name
                scopes.append((function_name(head), first))
                inside += 1
            head_start = position + 1
        elif char == "}":
            entry = scopes.pop() if scopes else None
            if entry is not None:
                inside -= 1
                if inside == 0 and entry[0]:
                    yield entry[0], entry[1], line - entry[1] + 1
            head_start = position + 1
        elif char == ";" and not inside:
            head_start = position + 1


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1


def findings(name, text):
    """Yields (is_fault, sentence) for one file."""
    lines = text.count("\n")
    if lines > FILE_AIM:
        yield False, f"{name}: {lines} lines (aim {FILE_AIM})"
    functions = python_functions(text) if name.endswith(".py") else cpp_functions(text)
    for function, first, length in functions:
        if length > FUNCTION_AIM:
            yield (length > FUNCTION_LIMIT, f"{name}:{first}: {function} has {length} lines "
                   f"(aim {FUNCTION_AIM}, limit {FUNCTION_LIMIT})")


def main():
    faults = 0
    for name in sys.argv[1:]:
        if not name.endswith(CPP + (".py",)):
            continue
        for is_fault, sentence in findings(name, pathlib.Path(name).read_text()):
            print(sentence if is_fault else f"note: {sentence}")
            faults += is_fault
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
