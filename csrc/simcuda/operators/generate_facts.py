"""Writes what native_functions.yaml says of the operators.

usage: generate_facts.py native_functions.yaml operator_facts.inc structured_meta.inc

operator_facts.inc has the kind of each operator's device check. structured_meta.inc has the C++
shape inference of each structured operator.

The file comes with torch (torchgen/packaged/ATen/native). It is read line by line: a YAML parser
would be one more thing to install, and drop a fact, the comment `# TensorIterator` behind
`device_check: NoCheck`. The check is made by TensorIterator then, by its own rules.
"""

import re
import sys


def facts(lines):
    """Yields schema, check (kSame, kIterator, kNone) and whether the kernel is structured."""
    schema, check, structured = None, "kSame", False
    for line in lines:
        if match := re.match(r"- func: (.+)", line):
            if schema:
                yield schema, check, structured
            schema, check, structured = match[1], "kSame", False
        elif match := re.match(r"  device_check: NoCheck\s*(#\s*TensorIterator)?", line):
            check = "kIterator" if match[1] else "kNone"
        elif re.match(r"  structured: True|  structured_delegate:", line):
            structured = True
    if schema:
        yield schema, check, structured


def meta_function(schema):
    """Names the function in at::meta of a schema, whose type at::_ops tells."""
    name = schema[: schema.index("(")]
    function = name.partition(".")[0]
    is_out = "!)" in schema and not function.endswith("_")
    if "SymInt" in schema:
        function += "_symint"
    if is_out:  # the form with the out= arguments at the end, as in the schema
        function += "_outf"
    return f'RESIDENCY_META({name.replace(".", "_")}, {function}, "{name}")'


def main():
    source, facts_file, meta_file = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        rows = sorted(
            {(schema[: schema.index("(")], schema, *rest) for schema, *rest in facts(file)}
        )
    if len(rows) < 1000:
        sys.exit(f"{source}: expected native_functions.yaml, found {len(rows)} operators in it")
    with open(facts_file, "w", encoding="utf-8") as file:
        for name, _, check, structured in rows:
            file.write(f'{{"{name}", DeviceCheck::{check}, {str(structured).lower()}}},\n')
    with open(meta_file, "w", encoding="utf-8") as file:
        file.writelines(
            meta_function(schema) + "\n" for _, schema, _, structured in rows if structured
        )


if __name__ == "__main__":
    main()
