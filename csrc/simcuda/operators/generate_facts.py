"""Writes operator_facts.inc: what native_functions.yaml says of the operators' device checks.

usage: generate_facts.py native_functions.yaml operator_facts.inc

The file comes with torch (torchgen/packaged/ATen/native). It is read line by line: a YAML parser
would be one more thing to install, and drop a fact, the comment `# TensorIterator` behind
`device_check: NoCheck`. The check is made by TensorIterator then, by its own rules.
"""

import re
import sys


def facts(lines):
    """Yields name, check (kSame, kIterator, kNone) and whether the kernel is structured."""
    name, check, structured = None, "kSame", "false"
    for line in lines:
        if match := re.match(r"- func: ([\w.]+)\(", line):
            if name:
                yield name, check, structured
            name, check, structured = match[1], "kSame", "false"
        elif match := re.match(r"  device_check: NoCheck\s*(#\s*TensorIterator)?", line):
            check = "kIterator" if match[1] else "kNone"
        elif re.match(r"  structured: True|  structured_delegate:", line):
            structured = "true"
    if name:
        yield name, check, structured


def main():
    source, destination = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        rows = sorted(set(facts(file)))
    if len(rows) < 1000:
        sys.exit(f"{source}: expected native_functions.yaml, found {len(rows)} operators in it")
    with open(destination, "w", encoding="utf-8") as file:
        for name, check, structured in rows:
            file.write(f'{{"{name}", DeviceCheck::{check}, {structured}}},\n')


if __name__ == "__main__":
    main()
