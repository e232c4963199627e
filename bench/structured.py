r"""Enforcement of JSON schemas: the share of test suites' documents that are judged correctly.

The suites are JSON Schema's official one and MaskBench.

    python -m bench.structured --suite json/tests/draft2020-12 --maskbench maskbench/data \
        --tokenizer FOLDER --out bench/results

--suite: a folder of the JSON-Schema-Test-Suite, which is in jsonschema's source distribution:
    pip download --no-deps --no-binary jsonschema jsonschema==4.26.0
--maskbench: the folder of github.com/guidance-ai/jsonschemabench; --sample files, evenly spread.
--tokenizer: tokenizer for the documents; without it they are split into bytes.

A document is accepted if the grammar of its schema, compiled as for `strict: true`, accepts it
token by token. Its properties are first put into the schema's order, the only order in which the
engine generates them. The comparison is llguidance alone, without the preprocessing of
`engine.structured.json_schema`.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.report.result_file import Line, write
from engine.errors import InvalidRequest
from engine.structured.compiler import Compiler, Vocabulary
from engine.structured.constraint import Constraint
from engine.structured.grammar import Grammar
from engine.structured.step_grammars import StepGrammars

# (name, schema, pairs of a document and whether it is valid)
Case = tuple[str, Any, list[tuple[Any, bool]]]

OUTCOMES = ("right", "refused", "invalid_accepted", "valid_rejected", "failed")


def suite_cases(files: list[Path]) -> Iterator[Case]:
    """Yield the cases of the JSON-Schema-Test-Suite."""
    for path in files:
        for group in json.loads(path.read_text()):
            tests = [(test["data"], test["valid"]) for test in group["tests"]]
            yield f"{path.stem}: {group['description']}", group["schema"], tests


def maskbench_cases(folder: Path, sample: int) -> Iterator[Case]:
    """Yield `sample` cases of MaskBench, evenly spaced over its files by name."""
    files = sorted(folder.glob("*.json"))
    step = max(1.0, len(files) / sample) if sample else 1.0
    for i in range(min(len(files), sample or len(files))):
        path = files[int(i * step)]
        content = json.loads(path.read_text())
        tests = [(test["data"], test["valid"]) for test in content.get("tests", [])]
        yield path.stem, content["schema"], tests


def in_order(value: Any, schema: Any) -> Any:
    """Return a document with its properties in the schema's order.

    Only the schema's own `properties` and `items` define the order.
    """
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        prefix = schema.get("prefixItems")
        first = prefix if isinstance(prefix, list) else []
        further = schema.get("items")
        return [
            in_order(inner, first[i] if i < len(first) else further)
            for i, inner in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    listed = [*known, *(required if isinstance(required, list) else [])]
    names = [name for name in dict.fromkeys(listed) if name in value]
    names += [name for name in value if name not in names]
    return {name: in_order(value[name], known.get(name)) for name in names}


class Judge:
    """A checker that compiles schemas to grammars and tests documents against them.

    It records compile and mask times in CPU milliseconds of this thread, as wall-clock times would
    include other programs.
    """

    def __init__(self, vocabulary: Vocabulary, compile_schema: Callable[[Any], Any]) -> None:
        self._vocabulary = vocabulary
        self._compile = compile_schema
        self._filler = StepGrammars(1)
        self.compile_ms: list[float] = []
        self.mask_ms: list[float] = []

    def outcomes(self, schema: Any, tests: list[tuple[Any, bool]], *, masks: bool) -> Counter[str]:
        """Return the number of a schema's documents by outcome, such as valid_rejected.

        The times of compiling and of masks are appended to the lists of this object.
        masks: whether to time masks.
        """
        counts: Counter[str] = Counter()
        began = time.thread_time()
        try:
            matcher = self._compile(schema)
        except InvalidRequest as error:
            if error.code != "unsatisfiable_schema":
                counts["refused"] = len(tests)
                return counts
            matcher = None  # no document is valid, so all are rejected
        self.compile_ms.append((time.thread_time() - began) * 1e3)
        for document, valid in tests:
            try:
                accepted = matcher is not None and self._takes(matcher, schema, document, masks)
            except Exception:
                counts["failed"] += 1
                continue
            wrong = "valid_rejected" if valid else "invalid_accepted"
            counts["right" if accepted == valid else wrong] += 1
        return counts

    def _takes(self, matcher: Any, schema: Any, document: Any, masks: bool) -> bool:
        text = json.dumps(in_order(document, schema), ensure_ascii=False, separators=(",", ":"))
        tokens = self._vocabulary.tokens.tokenize_str(text)
        own = matcher.deep_copy()
        constraint = Constraint(own, self._vocabulary)
        for token in tokens:
            if masks:
                began = time.thread_time()
                mask, _ = self._filler.fill([constraint])
                self.mask_ms.append((time.thread_time() - began) * 1e3)
                if not mask[0, token >> 5] >> (token & 31) & 1:
                    return False  # the mask forbids the token, so it would not be sampled
            if own.try_consume_tokens([token]) != 1:
                assert not masks, "a mask allows what the grammar does not"
                return False
        return bool(own.is_accepting())


def measure(
    name: str, cases: list[Case], vocabulary: Vocabulary, masks: bool
) -> tuple[list[Line], list[Line]]:
    """Return the table's rows, and a line for each schema with a wrong outcome.

    masks: whether to time masks.
    """
    compiler = Compiler(vocabulary)
    ours = Judge(
        vocabulary, lambda schema: compiler.compile(Grammar.json_schema(schema, strict=True))
    )

    def alone(schema: Any) -> Any:
        if not isinstance(schema, dict):
            schema = {} if schema else {"enum": []}
        return Compiler(vocabulary).compile(Grammar("json_schema", json.dumps(schema)))

    peer = Judge(vocabulary, alone)
    total: dict[str, Counter[str]] = {"ours": Counter(), "peer": Counter()}
    lines: list[Line] = []
    for case, schema, tests in cases:
        our_outcomes = ours.outcomes(schema, tests, masks=masks)
        bare = peer.outcomes(schema, tests, masks=False)
        total["ours"] += our_outcomes
        total["peer"] += bare
        if our_outcomes["right"] < len(tests) or bare != our_outcomes:
            lines.append(
                {"case": f"{name}/{case}", "ours": dict(our_outcomes), "llguidance": dict(bare)}
            )
    rows: list[Line] = [
        {
            "case": f"{name}/{outcome}",
            "ours": total["ours"][outcome],
            "llguidance": total["peer"][outcome],
            "unit": "documents",
        }
        for outcome in OUTCOMES
    ]
    times = {"compile": ours.compile_ms, "mask": ours.mask_ms}
    for what, values in times.items():
        for share in (50, 99, 100) if values else ():
            value = round(float(np.percentile(values, share)), 3)
            case = f"{name}/{what}_p{share}" if share < 100 else f"{name}/{what}_max"
            rows.append({"case": case, "ours": value, "unit": "ms"})
    return rows, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", type=Path, help="folder of the JSON-Schema-Test-Suite's drafts")
    parser.add_argument("--maskbench", type=Path, help="folder of MaskBench's data")
    parser.add_argument("--sample", type=int, default=300, help="of MaskBench's files; 0 = all")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    if args.tokenizer:
        from engine.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(args.tokenizer)
        size, ends = tokenizer.vocab_size, tokenizer.eos_token_ids
        vocabulary = Vocabulary.load(args.tokenizer, size, ends)
    else:
        vocabulary = Vocabulary.outline({0: "<end>"}, 257, (0,))
    sets: dict[str, list[Case]] = {}
    if args.suite:
        optional = sorted(args.suite.glob("optional/**/*.json"))
        sets["json-schema-suite"] = list(suite_cases(sorted(args.suite.glob("*.json"))))
        sets["json-schema-suite-optional"] = list(suite_cases(optional))
    if args.maskbench:
        sets["maskbench"] = list(maskbench_cases(args.maskbench, args.sample))
    rows: list[Line] = []
    lines: list[Line] = []
    for name, cases in sets.items():
        new_rows, raw = measure(name, cases, vocabulary, masks=args.tokenizer is not None)
        rows += new_rows
        lines += raw
    for row in rows:
        peer = f"{row['llguidance']:>10} llguidance alone" if "llguidance" in row else ""
        print(f"{row['case']:<45} {row['ours']:>10} {row['unit']:<10} {peer}")
    if args.out:
        config = {
            "ours": {"strict": True, "tokenizer": args.tokenizer.name if args.tokenizer else ""},
            "suite": str(args.suite.name) if args.suite else "",
            "maskbench": args.sample if args.maskbench else None,
        }
        write(args.out, "structured", config, rows, lines or rows)


if __name__ == "__main__":
    main()
