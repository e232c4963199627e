"""The compilation of requests' grammars in the router, so that constraints that cannot be enforced
are refused before a request is sent to an engine."""

import asyncio
import functools
import re
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from deployments.api.body_fields import name_fields
from deployments.api.fields.formats import StructuralTag
from deployments.api.http.errors import invalid
from deployments.api.output.constraints import RequestedGrammar
from deployments.api.output.grammar import tags_grammar
from deployments.api.output.plan import OutputPlan
from deployments.backend import ModelCard
from engine.errors import InvalidRequest, Overloaded
from engine.structured.grammar import Grammar
from engine.structured.json_schema import UnsupportedSchema, without
from engine.structured.sandbox import CHILDREN, GrammarSandbox
from engine.text.tokenizer import Tokenizer

# Maximum seconds for compiling one grammar; most take milliseconds.
SECONDS = 5.0
QUEUE_SECONDS = 20.0  # maximum seconds for which a request waits for its grammar
_MOST_LEFT_OUT = 32  # maximum of keywords left out of a schema, each by another compilation
# Keywords that are left out of a non-strict schema if they cannot be enforced. Invalid references,
# and patterns that no dialect accepts, are reported as errors.
_MAY_GO = (
    *("oneOf", "minProperties", "maxProperties", "patternProperties", "multipleOf"),
    "pattern",
)
_BROKEN = (  # in the compiler's messages for patterns that other dialects may accept, as [[]
    *("unclosed group", "unopened group", "unclosed character class"),
    *("missing expression", "incomplete escape"),
)
# Maximum characters of a pattern that is tried in Python's dialect.
_LONG_PATTERN = 4096

_pool = ThreadPoolExecutor(CHILDREN, thread_name_prefix="grammars")


@functools.lru_cache(maxsize=4)
def sandbox_of(tokenizer: Tokenizer, num_tokens: int, end_ids: tuple[int, ...]) -> GrammarSandbox:
    """Return the pool of child processes that compiles the grammars of one model; cached."""
    special = {i: tokenizer.token_text(i) for i in tokenizer.mark_ids}
    return GrammarSandbox(special, num_tokens, end_ids)


async def grammar_of(
    constraint: RequestedGrammar, tokenizer: Tokenizer, card: ModelCard
) -> tuple[Grammar, list[str]]:
    """Return the grammar for the engine, and the names of unenforced fields and keywords, for
    x-ignored-fields.

    Raises ApiError 400 naming the field and, by a JSON pointer, the keyword; Overloaded.
    """
    sandbox = sandbox_of(tokenizer, card.vocab_size, card.eos_token_ids)

    def work() -> tuple[Grammar, list[str]]:
        if constraint.kind == "tags":
            return _tagged(constraint, tokenizer, sandbox)
        grammar, left_out = _explained(constraint, sandbox)
        return grammar, name_fields(left_out, f"{constraint.where}#")

    grammar, ignored = await _waited(_pool.submit(work))
    return grammar, constraint.ignored + ignored


async def output_grammar_of(
    plan: OutputPlan, constraint: RequestedGrammar | None, card: ModelCard
) -> tuple[Grammar, list[str]]:
    """Return the grammar of an answer with tools or reasoning, and the names for x-ignored-fields.

    Raises ApiError 400 naming the field; Overloaded.
    """
    sandbox = sandbox_of(plan.tokenizer, card.vocab_size, card.eos_token_ids)
    where = "tools" if constraint is None else constraint.where

    def work() -> tuple[Grammar, list[str]]:
        try:
            grammar, ignored = plan.grammar(constraint, lambda one: _explained(one, sandbox))
            sandbox.check(grammar, SECONDS)
        except InvalidRequest as error:
            raise invalid(f"{where}: {error.message}", where, error.code) from None
        return grammar, ignored

    return await _waited(_pool.submit(work))


async def _waited(work: Future[tuple[Grammar, list[str]]]) -> tuple[Grammar, list[str]]:
    try:
        async with asyncio.timeout(QUEUE_SECONDS):
            return await asyncio.wrap_future(work)
    except TimeoutError:
        raise Overloaded("too many grammars are being compiled") from None


def _tagged(
    constraint: RequestedGrammar, tokenizer: Tokenizer, sandbox: GrammarSandbox
) -> tuple[Grammar, list[str]]:
    """Return the grammar of a StructuralTag, and the names for x-ignored-fields.

    Raises ApiError 400.
    """
    asked: StructuralTag = constraint.value
    ignored: list[str] = []
    tags = []
    for i, tag in enumerate(asked.structures):
        where = f"{constraint.where}.structures[{i}].schema"
        schema, left_out = _explained(
            RequestedGrammar(where, "json", True if tag.schema is None else tag.schema), sandbox
        )
        ignored += name_fields(left_out, f"{where}#")
        tags.append((tag.begin, msgspec.json.decode(schema.text), tag.end or ""))
    try:
        grammar = Grammar.lark(tags_grammar(tokenizer, tags, asked.triggers))
        sandbox.check(grammar, SECONDS)
    except InvalidRequest as error:
        at = constraint.where
        raise invalid(f"{at}: {error.message}", at, error.code) from None
    return grammar, ignored


def _explained(constraint: RequestedGrammar, sandbox: GrammarSandbox) -> tuple[Grammar, list[str]]:
    where = constraint.where
    try:
        return _compiled(constraint, sandbox)
    except UnsupportedSchema as error:
        at = f"{where}#{error.pointer}" if error.pointer else where
        raise invalid(f"{where}: {error.message}", at, error.code) from None
    except InvalidRequest as error:
        raise invalid(f"{where}: {error.message}", where, error.code) from None


def _compiled(constraint: RequestedGrammar, sandbox: GrammarSandbox) -> tuple[Grammar, list[str]]:
    grammar, left_out = constraint.grammar()
    for _ in range(_MOST_LEFT_OUT):
        try:
            sandbox.check(grammar, SECONDS)
            return grammar, left_out
        except UnsupportedSchema as error:
            name = error.pointer.rpartition("/")[2]
            if constraint.strict or error.code != "unsupported_schema" or name not in _MAY_GO:
                raise
            schema, value = without(msgspec.json.decode(grammar.text), error.pointer)
            if name == "pattern" and _is_broken(value, error.message):
                raise
            grammar = Grammar("json_schema", msgspec.json.encode(schema).decode())
            left_out.append(error.pointer)
    sandbox.check(grammar, SECONDS)
    return grammar, left_out


def _is_broken(pattern: Any, message: str) -> bool:
    """Whether a pattern is invalid, according to the compiler's message and to Python's `re`."""
    if not isinstance(pattern, str) or not any(sign in message for sign in _BROKEN):
        return not isinstance(pattern, str)
    if len(pattern) > _LONG_PATTERN:
        return True
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return True
    return False
