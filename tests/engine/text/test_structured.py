"""Structured output in the engine: grammars, constraints, and a real step loop over a random model
on the CPU."""

import json
import random
import time
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from engine import LLM
from engine.batch import Batch, OutOfMemory, StepResult
from engine.config.engine_config import EngineConfig
from engine.errors import InvalidRequest
from engine.factory import build
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from engine.scheduling.drafts.speculation import Speculation
from engine.structured import compiler as compiler_module
from engine.structured.compiler import LEXERS, Compiler, Vocabulary
from engine.structured.constraint import Constraint, Masks
from engine.structured.grammar import Grammar
from engine.structured.json_schema import UnsupportedSchema, enforceable
from engine.structured.step_grammars import StepGrammars
from engine.structured.thinking import ThinkingBudget
from engine.structured.token_limits import TokenLimits
from engine.text.declared_tokens import declared_special
from engine.text.tokenizer import Tokenizer
from tests.drafters import ListedLengths, ToldDrafter
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.text.small_tokenizers import byte_fallback, byte_level
from tests.fakes import Output, collect

TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "日本"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


def save_model(folder: Path, tokenizer: Tokenizer) -> Path:
    """Save a random model whose logits are wider than the vocabulary, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    size = tokenizer.vocab_size + 7
    ends = list(tokenizer.eos_token_ids)
    save_checkpoint(
        folder, "llama", vocab_size=size, eos_token_id=ends, max_position_embeddings=1024
    )
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=TOKENIZERS)
def model(request: Any, tmp_path_factory: Any) -> tuple[Path, Tokenizer]:
    tokenizer = TOKENIZERS[request.param]()
    return save_model(tmp_path_factory.mktemp(request.param), tokenizer), tokenizer


def make_core(folder: Path, **changes: Any) -> EngineCore:
    values: dict[str, Any] = {"num_blocks": 512, "max_num_seqs": 8, "num_threads": 1}
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", **{**values, **changes})
    return build(config)[0]


def request(id: int, grammar: Grammar | None, **fields: Any) -> EngineRequest:
    choice, output = fields.pop("choice", 0), fields.pop("output", [])
    values = {"max_tokens": 900, "temperature": 1.3, **fields}
    params = SamplingParams(structured=grammar, **values)
    params = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    prompt = [3 + (id + i) % 40 for i in range(10)]
    return EngineRequest(id, [*prompt, *output], 10, params, id * 17, choice)


def run(core: EngineCore, *requests: EngineRequest) -> dict[int, Output]:
    outputs: dict[int, Output] = {}
    for request in requests:
        core.add_request(request)
    while core.has_work() or core._preparing:
        collect(core.step(), outputs)
        core.check_integrity()
    return outputs


def text_of(tokenizer: Tokenizer, output: Output) -> str:
    ends = output.deltas[-1].stop_token is not None
    return tokenizer.decode(output.tokens[: len(output.tokens) - ends]).strip()


# ---- schemas -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema, pointer",
    [
        ({"properties": {"a/b": {"not": {"type": "null"}}}}, "/properties/a~1b/not"),
        ({"items": {"uniqueItems": True}}, "/items/uniqueItems"),
        ({"if": {}, "then": {"type": "null"}}, "/if"),
        ({"dependencies": {"a": ["b"]}}, "/dependencies"),
        ({"anyOf": [{}, {"format": "iri"}]}, "/anyOf/1/format"),
        ({"$defs": {"x": {"propertyNames": {"maxLength": 2}}}}, "/$defs/x/propertyNames"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], pointer: str) -> None:
    """A keyword that is dropped without a word, so that an answer breaks the schema; a pointer that
    is not escaped."""
    with pytest.raises(UnsupportedSchema) as caught:
        enforceable(schema, strict=True)
    assert caught.value.pointer == pointer and pointer in caught.value.message
    enforced, left_out = enforceable(schema, strict=False)
    assert left_out == [pointer]
    assert enforceable(enforced, strict=True) == (enforced, [])


def test_what_asks_for_nothing_is_no_reason_to_refuse() -> None:
    """A schema refused for a keyword without effect; a literal that is taken for a schema."""
    schema = {
        "uniqueItems": False,
        "unevaluatedProperties": {},
        "minContains": 2,
        "then": False,
        "x-guidance": {"lenient": True},
        "enum": [{"not": 1, "x-guidance": 2}],
    }
    assert enforceable(schema, strict=True) == ({"enum": [{"not": 1, "x-guidance": 2}]}, [])
    assert enforceable({"format": "int32"}, strict=True) == ({}, ["/format"])
    assert enforceable({"properties": {"not": {"type": "null"}}}, strict=True)[1] == []


def test_one_of_becomes_any_of_where_branches_exclude_each_other() -> None:
    """Branches that overlap and are taken for disjoint: what only one may allow, both would."""
    tagged = [
        {"properties": {"kind": {"const": "a"}}, "required": ["kind"], "type": "object"},
        {"properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"], "type": "object"},
    ]
    disjoint = [
        tagged,
        [{"type": "string"}, {"type": ["null", "integer"]}],
        [{"const": 1}, {"enum": ["1", 2]}],
        [{"$ref": "#/$defs/a"}, tagged[1]],
    ]
    overlapping = [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"enum": [1.0, 2]}],
        [{"type": "string"}, {"minLength": 2}],
        [tagged[0], {"type": "object"}],
        [{**tagged[0], "required": []}, {**tagged[1], "required": []}],
        [{"$ref": "#/nowhere"}, {"type": "null"}],
        [{**tagged[0], "type": ["object", "null"]}, {**tagged[1], "type": ["object", "null"]}],
    ]
    for expected, cases in (("anyOf", disjoint), ("oneOf", overlapping)):
        for branches in cases:
            schema = {"oneOf": branches, "$defs": {"a": tagged[0]}}
            assert expected in enforceable(schema, strict=True)[0], branches


@pytest.mark.parametrize(
    "grammar, code",
    [
        (Grammar("regex", "a(?=b)"), "invalid_grammar"),
        (Grammar("regex", "(["), "invalid_grammar"),
        (Grammar("lark", "start: nothing"), "invalid_grammar"),
        (Grammar("gbnf", "root ::= ("), "invalid_grammar"),
        (Grammar("json_schema", '{"type": "nonsense"}'), "unsupported_schema"),
        (Grammar("json_schema", '{"enum": []}'), "unsatisfiable_schema"),
        (Grammar("json_schema", '{"$ref": "https://example.com/a"}'), "unsupported_schema"),
        (Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'), ""),
    ],
    ids=lambda v: v.text if isinstance(v, Grammar) else v,
)
def test_bad_grammars(compiler: Compiler, grammar: Grammar, code: str) -> None:
    """A panic or another exception of the library; an error that is remembered as a success."""
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            compiler.compile(grammar)
        assert caught.value.code == (code or "unsatisfiable_schema")


def test_pointer_of_what_only_the_compiler_refuses(compiler: Compiler) -> None:
    """The pointer of another use of the same keyword."""
    integer = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    fine = {"oneOf": [{"type": "null"}, {"type": "number"}]}
    grammar = Grammar.json_schema({"properties": {"a": fine, "b": {"items": integer}}})
    with pytest.raises(UnsupportedSchema) as caught:
        compiler.compile(grammar)
    assert caught.value.pointer == "/properties/b/items/oneOf"


def test_too_large() -> None:
    """A recursion that ends the process, or a text that is compiled for minutes."""
    with pytest.raises(InvalidRequest) as caught:
        Grammar.regex("a" * 300_000)
    assert caught.value.code == "grammar_too_large"
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest) as caught:
        Grammar.json_schema(deep)
    assert caught.value.code == "grammar_too_large"


# ---- constraints -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: Any) -> Compiler:
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer = byte_level()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return Compiler(Vocabulary.load(folder, tokenizer.vocab_size + 7, tokenizer.eos_token_ids))


def forced(compiler: Compiler, grammar: Grammar) -> list[int]:
    """Return the tokens of the one text that a grammar allows, by its masks."""
    matcher = compiler.compile(grammar).deep_copy()
    ids: list[int] = []
    while not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        legal = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
        if legal <= compiler.vocabulary.end_ids:
            break
        (token,) = legal
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return ids


# Beside a special token, an added one that is none, and one that has no brackets.
@pytest.mark.parametrize("text", ["<think>", "<|im_end|>", "x<think><|im_start|>y", "a tool"])
def test_a_constant_may_spell_a_mark(compiler: Compiler, text: str) -> None:
    """A control token that a constant forces, which the grammar then forbids: an engine's error."""
    written = json.dumps(text)
    for grammar in (
        Grammar.regex(text.replace("|", "\\|")),
        Grammar.choice([text]),
        Grammar.lark(f"start: {written}"),
        Grammar.gbnf(f"root ::= {written}"),
        Grammar.json_schema({"const": text}),
    ):
        ids = forced(compiler, grammar)
        expected = written if grammar.kind == "json_schema" else text
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == expected
        assert not TOKENIZER.mark_ids & set(ids)
    assert not TOKENIZER.mark_ids & set(forced(compiler, Grammar.regex("a tool")))


JSON_GBNF = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    "grammar, valid, invalid",
    [
        (JSON_GBNF, ['{"a": [1.5e-3, {}], "\\u00e9": "日]"}', "{}"], ["[]", '{"a" 1}', "{} {}"]),
        (
            'root ::= (expr "=" ws term "\\n")+\nexpr ::= term ([-+*/] term)*\n'
            'term ::= [a-z] ws | [0-9]+ ws | "(" ws expr ")" ws\nws ::= [ \\t\\n]*',
            ["a+12*(b/3)=4\n", "1=2\n3=4\n"],
            ["1=2", "a~b=1\n"],
        ),
        # Rules that end where another begins with the same.
        ('root ::= word "x" digits\nword ::= [a-z]+\ndigits ::= [0-9]* "7"', ["axx177"], ["ax1"]),
        # Names of Lark's own, and names that differ in what Lark does not tell apart.
        (
            'root ::= start import a-b a_b A-b\nstart ::= "s"\nimport ::= "i" \na-b ::= "1"\n'
            'a_b ::= "2"\nA-b ::= "3"',
            ["si123"],
            ["si132", "si12"],
        ),
        (
            r'root ::= "\x41\u0042\U00000043\u00e9\t\"\\" [\x61-\x63&&~\n\]\[^/] . [^&]',
            ['ABCé\t"\\&\nx', 'ABCé\t"\\[\\~', 'ABCé\t"\\/日a'],
            ['ABCé\t"\\d\nx', 'ABCé\t"\\a\n&'],
        ),
        ('root ::= ("a" "b"){2,3} "c"{2} ("" | "d")\r\n', ["ababcc", "abababccd"], ["abcc"]),
        ('root ::= root "a" | "b" # left\n', ["b", "baa"], ["ab", "a"]),
    ],
)
def test_gbnf(compiler: Compiler, grammar: str, valid: list[str], invalid: list[str]) -> None:
    """A grammar of llama.cpp's that allows what it does not describe, or not all of it."""

    def accepts(text: str) -> bool:
        matcher = compiler.compile(Grammar.gbnf(grammar)).deep_copy()
        ids = TOKENIZER.encode_plain(text)
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    assert [text for text in valid if not accepts(text)] == []
    assert [text for text in invalid if accepts(text)] == []


@pytest.mark.parametrize(
    "grammar, why",
    [
        ("root ::= other", "the rule root uses other, which is not defined"),
        ('start ::= "a"', "no rule root"),
        ('root ::= "a', "line 1"),
        ("root ::= " + "(" * 5000, "too deep"),
    ],
)
def test_bad_gbnf(compiler: Compiler, grammar: str, why: str) -> None:
    """An error that does not tell what to mend."""
    with pytest.raises(InvalidRequest, match=why) as caught:
        compiler.compile(Grammar.gbnf(grammar))
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize("text", ["a▁b", "▁", "  a", "e\u0301", "\ufb01"])
@pytest.mark.parametrize("kind", ["regex", "choice", "lark", "gbnf", "json_schema"])
def test_a_constant_that_tokens_do_not_keep(tmp_path: Path, kind: str, text: str) -> None:
    """A character that a tokenizer reads as another one, and whose tokens are forced all the same:
    the answer is none that the grammar allows."""
    tokenizer = byte_fallback()
    backend = json.loads(tokenizer.backend.to_str())
    backend["normalizer"]["normalizers"].insert(0, {"type": "NFKC"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    compiler = Compiler(Vocabulary.load(tmp_path, tokenizer.vocab_size, tokenizer.eos_token_ids))
    written = json.dumps(text, ensure_ascii=False)
    grammar = {
        "regex": Grammar.regex(text),
        "choice": Grammar.choice([text]),
        "lark": Grammar.lark(f"start: {json.dumps(text)}"),
        "gbnf": Grammar.gbnf(f"root ::= {written}"),
        "json_schema": Grammar.json_schema({"const": text}),
    }[kind]
    matcher = compiler.compile(grammar).deep_copy()
    data = b""
    while not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        legal = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if set(legal.tolist()) <= compiler.vocabulary.end_ids:
            break
        assert matcher.consume_token(int(legal[0])), matcher.get_error()
        data += tokenizer.token_bytes(int(legal[0]))
    assert data.decode() == (written if kind == "json_schema" else text)


def test_control_tokens_that_are_declared_beside_the_tokenizer(tmp_path: Path) -> None:
    """One that is a piece of text to tokenizer.json, even one that pieces merge to: text with it
    is not shown."""
    backend = json.loads(byte_fallback().backend.to_str())
    backend["added_tokens"] = []
    size = len(backend["model"]["vocab"])
    backend["model"]["vocab"] |= {"<": size, "s>": size + 1, "<s>x": size + 2}
    backend["model"]["merges"] += [["<", "s>"], ["<s>", "x"]]
    backend["model"]["vocab"] |= {"s": size + 3, ">": size + 4, "x": size + 5}
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    settings = {"bos_token": "<s>", "added_tokens_decoder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert declared_special(tmp_path) == {"<s>"}
    begin = backend["model"]["vocab"]["<s>"]
    loaded = Tokenizer.load(tmp_path)
    assert begin in loaded.mark_ids
    vocabulary = Vocabulary.load(tmp_path, size + 6, (2,), declared_special(tmp_path))
    compiler = Compiler(vocabulary)
    assert begin not in forced(compiler, Grammar.choice(["<s>x"]))
    constraint = Constraint(compiler.compile(Grammar.regex(".*")).deep_copy(), vocabulary)
    assert begin not in allowed(constraint)


@pytest.mark.parametrize("added", [True, False])
def test_an_end_that_is_a_piece_of_text(tmp_path: Path, added: bool) -> None:
    """An end token that is no special one, which a text may spell: the answer ends inside it."""
    tokenizer = byte_fallback()
    backend = json.loads(tokenizer.backend.to_str())
    tokens = [token for token in backend["added_tokens"] if token["content"] != "</s>"]
    (end,) = tokenizer.eos_token_ids
    if added:
        tokens.append({**tokens[0], "id": end, "content": "</s>", "special": False})
    backend["added_tokens"] = tokens
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    vocabulary = Vocabulary.load(tmp_path, tokenizer.vocab_size, (end,))
    assert vocabulary.text_of(end) == b"</s>"
    compiler = Compiler(vocabulary)
    assert end not in forced(compiler, Grammar.choice(["a</s>"]))
    constraint = Constraint(compiler.compile(Grammar.regex("a.*b")).deep_copy(), vocabulary)
    constraint.accept_token(tokenizer.encode_plain("a")[-1])
    assert end not in allowed(constraint)


def test_lark_names_marks(compiler: Compiler) -> None:
    """A name that means no token, or one within a text, a pattern or a comment that does."""
    think = TOKENIZER.token_id("<think>")
    end = TOKENIZER.token_id("<|end|>")
    text = 'start: <think> "<think>" /[<]think>"/ <|end|> // "<think>\n'
    ids = forced(compiler, Grammar.lark(text))
    assert (ids[0], ids[-1]) == (think, end)
    assert TOKENIZER.decode(ids[1:-1]) == '<think><think>"'
    assert compiler.vocabulary.text_of(ids[0]) == b"<think>"
    with pytest.raises(InvalidRequest, match="nothing"):
        compiler.compile(Grammar.lark("start: <nothing>"))


TOKENIZER = byte_level()
(EOS,) = TOKENIZER.eos_token_ids


def allowed(constraint: Constraint) -> set[int]:
    masks, failed = StepGrammars(1).fill([constraint])
    assert not failed
    return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist())


def test_ends_only_where_the_grammar_is_satisfied(compiler: Compiler) -> None:
    """A stop token in the middle of a document, or one that cannot be sampled behind it."""
    b, newline = TOKENIZER.encode("b")[0], TOKENIZER.encode("\n")[0]
    matcher = compiler.compile(Grammar.regex("ab+"))
    constraint = Constraint(matcher.deep_copy(), compiler.vocabulary, [newline, b])
    a = TOKENIZER.encode("a")[0]
    assert EOS not in allowed(constraint) and newline not in allowed(constraint)
    assert not constraint.ends_with(a) and not constraint.accept_token(a)
    assert {b} <= allowed(constraint) and not {EOS, newline} & allowed(constraint)
    assert not constraint.ends_with(b), "what is needed is text, though it is a stop token"
    assert not constraint.accept_token(b)
    assert {EOS, newline, b} <= allowed(constraint)
    assert constraint.ends_with(b) and constraint.ends_with(newline) and constraint.ends_with(EOS)
    with pytest.raises(ValueError, match="not in the grammar"):
        constraint.accept_token(a)


def test_min_tokens_and_ignore_eos_hold_while_the_grammar_leaves_a_choice(
    compiler: Compiler,
) -> None:
    """Nothing but -inf: the step would fail with a numerical error."""
    b, a = TOKENIZER.encode("b")[0], TOKENIZER.encode("a")[0]
    for changes in ({"min_tokens": 3}, {"ignore_eos": True}):
        matcher = compiler.compile(Grammar.regex("ab{1,2}")).deep_copy()
        constraint = Constraint(matcher, compiler.vocabulary, **changes)
        constraint.accept_token(a)
        constraint.accept_token(b)
        assert EOS not in allowed(constraint) and b in allowed(constraint)
        assert constraint.accept_token(b), "complete: nothing may follow"


def test_resumed_is_where_it_was(compiler: Compiler) -> None:
    """A constraint that begins anew, or takes what does not fit."""
    grammar = Grammar.json_schema(PERSON)
    ids = TOKENIZER.encode('{"name": "ab", "age": 12')
    first = Constraint(compiler.compile(grammar).deep_copy(), compiler.vocabulary)
    for token in ids:
        first.accept_token(token)
    second = Constraint(compiler.compile(grammar).deep_copy(), compiler.vocabulary)
    assert second.resume(ids) and allowed(first) == allowed(second)
    third = Constraint(compiler.compile(grammar).deep_copy(), compiler.vocabulary)
    assert not third.resume(TOKENIZER.encode('{"other"'))


@pytest.mark.slow
def test_a_step_that_is_too_expensive_ends_its_own_request(compiler: Compiler) -> None:
    """One request's grammar that holds up the step of all others, or ends them."""
    many = {f"name{i}": {"type": "string"} for i in range(5000)}
    inner = {"type": "object", "properties": many}
    outer = {"type": "object", "properties": {"x": inner}, "required": ["x"]}
    costly = Constraint(
        compiler.compile(Grammar.json_schema(outer)).deep_copy(), compiler.vocabulary
    )
    others = [
        Constraint(compiler.compile(Grammar.regex("[ab]{9}")).deep_copy(), compiler.vocabulary)
        for _ in range(9)
    ]
    with pytest.raises(ValueError, match="grammar_too_complex"):
        for token in TOKENIZER.encode('{"x":{"'):
            costly.accept_token(token)
    for threads in (1, 2):
        masks, failed = StepGrammars(threads).fill([*others, costly])
        assert list(failed) == [9] and failed[9].startswith("grammar_too_complex")
        assert masks.shape == (10, -(-compiler.vocabulary.num_tokens // 32))
        assert (masks[:9] == masks[0]).all()
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(Grammar.json_schema(inner))
    assert caught.value.code == "grammar_too_complex"


def test_requests_are_dealt_out_to_several_lexers(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of one grammar's requests that are made one after the other, whatever the threads: a
    copy of a matcher waits for the other's lexer. A mask in another's place, as they are sorted by
    lexers. Memory that grows with the lexers of all grammars."""
    grammar = Grammar.json_schema(PERSON)
    assert len({compiler.matcher(grammar)[1].number for _ in range(3)}) == 1, "one after the other"
    matchers = [compiler.matcher(grammar) for _ in range(2 * LEXERS + 1)]
    users = Counter(use.number for _, use in matchers)
    assert len(users) == LEXERS and sorted(users.values()) == [2] * (LEXERS - 1) + [3]
    text = TOKENIZER.encode('{"name": "ab", "age": 12, "tags": [], "address"')
    choices = [Constraint(own, compiler.vocabulary, use=use) for own, use in matchers]
    for at, choice in enumerate(choices):
        assert choice.resume(text[: at % len(text)])
    alone = [StepGrammars(1).fill([choice])[0][0].copy() for choice in choices]
    together, failed = StepGrammars(2).fill(choices)
    assert not failed and (together == alone).all()
    assert len({mask.tobytes() for mask in alone}) > 3
    with pytest.raises(InvalidRequest, match="cannot be used"):
        compiler.matcher(Grammar.regex("(["))
    monkeypatch.setattr(compiler_module, "MOST_LEXERS", LEXERS)
    more = [compiler.matcher(Grammar.regex("ab")) for _ in range(LEXERS)]
    assert len({use.number for _, use in more}) == LEXERS
    assert list(compiler._known) == [Grammar.regex("ab")]


def test_a_full_lexer_is_not_handed_on(compiler: Compiler, monkeypatch: Any) -> None:
    """A grammar that is refused for ever, as those who used it before have filled its lexer; what
    says that the token was not in the grammar."""
    monkeypatch.setattr(compiler_module, "LEXERS", 1)
    letters = [TOKENIZER.encode(letter)[0] for letter in "ab"]
    grammar = Grammar.regex("(a|b)*a(a|b){18}c")
    rng = random.Random(0)

    def walk() -> None:
        constraint = Constraint(compiler.matcher(grammar)[0], compiler.vocabulary)
        for _ in range(300):
            constraint.accept_token(rng.choice(letters))

    with pytest.raises(ValueError, match="grammar_too_complex"):
        for _ in range(1000):
            walk()
    walk()


def test_masks_in_use_are_left_alone(compiler: Compiler) -> None:
    """Memory asked for at each step; masks overwritten that a step in flight has yet to read."""
    asked: list[int] = []

    def memory(rows: int, words: int) -> Masks:
        asked.append(rows)
        return np.zeros((rows, words), np.int32)

    def choices(pattern: str, count: int) -> list[Constraint]:
        matcher = compiler.compile(Grammar.regex(pattern))
        return [Constraint(matcher.deep_copy(), compiler.vocabulary) for _ in range(count)]

    grammars = StepGrammars(1, 2, memory)
    first, _ = grammars.fill(choices("a", 3))
    copy = first.copy()
    second, _ = grammars.fill(choices("b", 2))
    assert (first == copy).all() and not (first[:2] == second).all()
    for count in (1, 3, 4, 2):
        masks, _ = grammars.fill(choices("[cd]", count))
        assert masks.shape == (count, -(-compiler.vocabulary.num_tokens // 32))
        assert (masks == allowed_words(compiler, "[cd]")).all(), "what was there before is left"
    assert asked == [4, 2, 4]


def allowed_words(compiler: Compiler, pattern: str) -> Masks:
    matcher = compiler.compile(Grammar.regex(pattern)).deep_copy()
    return StepGrammars(1).fill([Constraint(matcher, compiler.vocabulary)])[0]


@pytest.mark.parametrize(
    "bounds, fit, not_fit",
    [
        ({}, [0, -5, 2**63 - 1024, -(2**63) + 1024], [10**30, -(2**63)]),
        ({"minimum": 1}, [1, 10**18], [0, 10**30]),
        ({"exclusiveMaximum": 0}, [-1, -(10**18)], [0, -(10**30)]),
    ],
    ids=str,
)
def test_integers_have_64_bits(
    compiler: Compiler, bounds: dict[str, Any], fit: list[int], not_fit: list[int]
) -> None:
    """Digits for ever; bounds that do not compile, so that no integer can be asked for."""
    matcher = compiler.compile(Grammar.json_schema({"type": "integer", **bounds}))
    for value in [*fit, *not_fit]:
        constraint = Constraint(matcher.deep_copy(), compiler.vocabulary)
        takes = constraint.resume(TOKENIZER.encode(str(value))) and EOS in allowed(constraint)
        assert takes == (value in fit), value


# ---- the step loop -----------------------------------------------------------------------------


AHEAD = pytest.mark.parametrize(
    "ahead", [pytest.param(False, marks=pytest.mark.slow), True], ids=["in_turn", "ahead"]
)
# Of tests in which a vocabulary plays no part.
ONE_TOKENIZER = pytest.mark.parametrize("model", ["byte_level"], indirect=True)


@AHEAD
def test_outputs_are_valid_and_the_same_however_they_run(
    model: tuple[Path, Tokenizer], ahead: bool
) -> None:
    """A mask of a step too early or too late, of another row, or lost in a preemption; a grammar
    that has taken a token twice."""
    folder, tokenizer = model
    grammar = Grammar.json_schema(PERSON)
    alone = make_core(folder)
    expected = {}
    for id in range(1, 5):
        output = run(alone, request(id, grammar))[id]
        assert output.finish == "stop", output
        jsonschema.validate(json.loads(text_of(tokenizer, output)), PERSON)
        expected[id] = output.tokens
    assert len({tuple(tokens) for tokens in expected.values()}) == 4, "seeds make no difference"
    plain = run(alone, request(90, None, max_tokens=60, ignore_eos=True))[90].tokens

    core = make_core(folder, num_blocks=20, async_scheduling=ahead, max_model_len=300)
    free = request(90, None, max_tokens=60, ignore_eos=True)
    outputs = run(core, *(request(id, grammar) for id in expected), free)
    assert core.scheduler.counters.preemptions > 0
    assert {id: outputs[id].tokens for id in expected} == expected
    assert outputs[90].tokens == plain, "a neighbour with a grammar changes others"


LETTER = Grammar.regex(
    r"Dear Mr\. (Smith|Miller), thank you for your letter of [0-9]{1,2} (May|June)!"
)
DRAFTED: list[tuple[Grammar | None, dict[str, Any]]] = [
    (Grammar.json_schema(PERSON), {}),
    (Grammar.json_schema(PERSON), {"temperature": 0.0, "logprobs": 1}),
    (Grammar.json_schema(PERSON), {"repetition_penalty": 1.5, "min_tokens": 20}),
    (LETTER, {"temperature": 0.7}),
    (LETTER, {"stop_token_ids": [5, 6, 7], "min_tokens": 3, "ignore_eos": True}),
    (LETTER, {"max_tokens": 12}),
    (None, {"max_tokens": 40, "allowed_token_ids": list(range(3, 60))}),
    (None, {"max_tokens": 40, "bad_words_ids": [[9], [4, 5], [7, 8, 9]], "ignore_eos": True}),
]


def drafted_requests() -> list[EngineRequest]:
    return [request(id, case[0], **case[1]) for id, case in enumerate(DRAFTED, 1)]


@cache
def without_drafts(folder: Path, ahead: bool) -> tuple[dict[int, Output], int]:
    """Return the outputs of `drafted_requests` without drafts, and the number of steps."""
    core = make_core(folder, async_scheduling=ahead)
    core.scheduler.speculate(None)
    return run(core, *drafted_requests()), core.stats().step


@AHEAD
@pytest.mark.parametrize(
    "kind", ["right", pytest.param("wrong", marks=pytest.mark.slow), "mixed", "forced"]
)
def test_text_with_drafts_is_the_text_without(
    model: tuple[Path, Tokenizer], kind: str, ahead: bool
) -> None:
    """Bugs: a draft's mask is that of the place before; a draft that is rejected has moved the
    grammar, the list of bad words or the count of tokens; an end among drafts is overlooked; right
    drafts of a grammar are not accepted, or what it forces is not drafted."""
    plain, steps = without_drafts(model[0], ahead)
    answers = {tuple(r.token_ids): plain[r.id].tokens for r in drafted_requests()}
    lengths = ListedLengths([7, 3, 1, 0] if kind != "forced" else [0])
    core = make_core(model[0], async_scheduling=ahead, max_num_seqs=64)
    core.scheduler.speculate(Speculation(ToldDrafter(kind, answers), lengths))
    drafted = run(core, *drafted_requests())
    for r in drafted_requests():
        some, other = drafted[r.id], plain[r.id]
        assert (some.tokens, some.finish) == (other.tokens, other.finish), DRAFTED[r.id - 1]
        assert some.deltas[-1].stop_token == other.deltas[-1].stop_token
        ids = [[i.token_id for d in o.deltas for i in d.logprobs or []] for o in (some, other)]
        assert ids[0] == ids[1]
    stats = core.stats()
    accepted = sum(stats.accepted_by_position)
    if kind == "forced":
        assert lengths.drafted == 0 and accepted > 20
    if kind == "right":
        assert lengths.accepted == lengths.drafted > 100 and stats.step < 0.7 * steps


def test_a_constraint_does_not_change_with_a_draft(compiler: Compiler) -> None:
    """Bug: a rejected draft is still counted as text by lists, thinking or min_tokens."""
    limits = TokenLimits((), [[4, 5], [6]], 64)
    lists = Constraint.without_grammar(64, (2,), 2, limits, [])
    before = allowed(lists)
    later = lists.after(4)
    assert later is not None and 5 not in allowed(later) and allowed(lists) == before
    assert lists.after(6) is None and later.after(5) is None
    second = later.after(7)
    assert second is not None and second.after(2) is None, "an end token is no text"
    assert later.after(2) is not None, "below min_tokens the mask decides"

    matcher, use = compiler.matcher(Grammar.regex("(ab){2,3}"))
    budget = ThinkingBudget(tokens=1, end=(9,), ends=("zz",))
    letters = Constraint(matcher, compiler.vocabulary, min_tokens=3, thinking=budget, use=use)
    a, b = (compiler.vocabulary.tokens.tokenize_str(letter)[0] for letter in "ab")
    before = allowed(letters)
    step: Constraint | None = letters
    for token in (a, b, a, b, a):
        assert step is not None and step.after(a if token == b else b) is None
        step = step.after(token)
    assert step is not None and step.after(b) is None, "it completes the text"
    assert allowed(letters) == before
    assert letters._left == 3 and letters._thinking is not None and letters._thinking._used == 0


def test_a_draft_after_which_no_token_is_left(model: tuple[Path, Tokenizer]) -> None:
    """Bug: a mask that allows nothing fails a request whose text does not go there, or is taken as
    one that allows all."""
    plain_core = make_core(model[0])
    plain_core.scheduler.speculate(None)
    case = {"max_tokens": 30, "allowed_token_ids": [9, 10], "bad_words_ids": [[9, 9], [9, 10]]}

    def ask() -> EngineRequest:
        return request(1, None, temperature=1.0, ignore_eos=True, **case)

    plain = run(plain_core, ask())[1]
    assert plain.finish == "error" and plain.tokens[-1] == 9, "the fixture's text never gets there"
    core = make_core(model[0], max_num_seqs=64)
    for prediction in ([9] * 30, [10, 9] * 15, plain.tokens):
        drafter = ToldDrafter("right", {tuple(ask().token_ids): prediction})
        drafter.trusted = False
        core.scheduler.speculate(Speculation(drafter, ListedLengths([7])))
        output = run(core, ask())[1]
        assert (output.tokens, output.finish) == (plain.tokens, "error")


@ONE_TOKENIZER
@AHEAD
def test_with_everything_else_that_sampling_does(
    model: tuple[Path, Tokenizer], ahead: bool
) -> None:
    """Penalties, biases, filters, choices and log-probabilities beside a mask: the mask is the last
    edit, and what is reported is of the raw distribution."""
    folder, tokenizer = model
    core = make_core(folder, async_scheduling=ahead)
    grammar = Grammar.json_schema(PERSON)
    brace = tokenizer.encode("{")[-1]
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.1},
        {"min_p": 0.5},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": {brace: -100.0}},
        {"logprobs": 5},
        {"logprobs": 0, "choice": 3},
    ]
    outputs = run(core, *(request(i, grammar, **case) for i, case in enumerate(cases, 1)))
    for i, case in enumerate(cases, 1):
        assert outputs[i].finish == "stop", case
        jsonschema.validate(json.loads(text_of(tokenizer, outputs[i])), PERSON)
    logprobs = [item for delta in outputs[7].deltas for item in delta.logprobs or []]
    assert [item.token_id for item in logprobs] == outputs[7].tokens
    assert any(item.rank > 5 for item in logprobs), "ranks of what was left by the mask"
    assert all(len(item.top_ids) == 5 for item in logprobs)


def test_ends(model: tuple[Path, Tokenizer]) -> None:
    """A document that is cut is told by "length"; one that is complete ends without an end token;
    stop tokens and min_tokens give way to the grammar."""
    folder, tokenizer = model
    core = make_core(folder)
    finishing = tokenizer.encode("}")[-1]
    outputs = run(
        core,
        request(1, Grammar.json_schema(PERSON), max_tokens=5),
        request(2, Grammar.json_schema(PERSON), stop_token_ids=[finishing]),
        request(3, Grammar.choice(["yes", "no"]), min_tokens=50),
        request(4, Grammar.choice(["yes", "no"]), ignore_eos=True),
        request(5, Grammar.regex("[ab]{3,}"), stop_token_ids=[tokenizer.encode("a")[-1]]),
        request(6, Grammar.gbnf('root ::= "x" [0-9] "y"')),
        request(7, Grammar.lark('start: "x" /[0-9]/ "y"')),
    )
    assert (outputs[1].finish, len(outputs[1].tokens)) == ("length", 5)
    jsonschema.validate(json.loads(text_of(tokenizer, outputs[2])), PERSON)
    for id in (3, 4):
        assert text_of(tokenizer, outputs[id]) in ("yes", "no") and outputs[id].finish == "stop"
    text = text_of(tokenizer, outputs[5])
    assert len(text) >= 3 and set(text) <= {"a", "b"}
    for id in (6, 7):
        text = text_of(tokenizer, outputs[id])
        assert text[0] == "x" and text[1].isdigit() and text[2:] == "y"


@ONE_TOKENIZER
@AHEAD
def test_goes_on_elsewhere(model: tuple[Path, Tokenizer], ahead: bool) -> None:
    """A replica that takes over starts the grammar anew, or a token late."""
    folder, _ = model
    grammar = Grammar.json_schema(PERSON)
    whole = run(make_core(folder), request(1, grammar))[1].tokens
    core = make_core(folder, async_scheduling=ahead)
    for cut in (1, len(whole) // 2):
        output = run(core, request(1, grammar, output=whole[:cut]))[1]
        assert whole[:cut] + output.tokens == whole and output.finish == "stop"
    output = run(core, request(1, grammar, output=whole))[1]
    assert (output.tokens, output.finish) == ([], "stop")


class SlowDevice:
    """A runner that does all of a step when it is waited for, as late as a device may."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.two_masked = 0  # steps launched with masks while others had theirs
        self._masked = 0

    def launch(self, batch: Batch) -> "SlowStep":
        return SlowStep(self, self._runner, deepcopy(batch))


class SlowStep:
    def __init__(self, device: SlowDevice, runner: Any, batch: Batch) -> None:
        self._device, self._runner, self._batch = device, runner, batch
        self._masks: Masks | None = None

    def sample(self, masks: Masks) -> None:
        self._masks = masks
        self._device._masked += 1
        self._device.two_masked += self._device._masked > 1

    def wait(self) -> StepResult:
        pending = self._runner.launch(self._batch)
        if self._masks is not None:
            self._device._masked -= 1
            pending.sample(self._masks)
        result: StepResult = pending.wait()
        return result


def test_a_device_reads_the_masks_of_its_own_step(tmp_path: Path) -> None:
    """Masks of a request that begins, written where a step in flight is still to read its own."""
    folder = save_model(tmp_path, byte_level())
    core = make_core(folder, async_scheduling=True)
    device = core._runner = SlowDevice(core._runner)
    outputs: dict[int, Output] = {}
    for id in range(1, 7):  # each begins while the step before has the only token of another
        core.add_request(request(id, Grammar.choice([TOKENIZER.decode([40 + id])]), max_tokens=1))
        while not core._grammars.has_news():
            time.sleep(0.001)
        collect(core.step(), outputs)
    while core.has_work():
        collect(core.step(), outputs)
    assert device.two_masked > 0, "no two steps had masks at once"
    assert {id: output.tokens for id, output in outputs.items()} == {
        id: [40 + id] for id in range(1, 7)
    }


class LateFailure:
    """A SlowDevice whose sampling runs out of memory once."""

    def __init__(self, runner: Any, at: int) -> None:
        self._device = SlowDevice(runner)
        self._left = at

    def launch(self, batch: Batch) -> Any:
        pending = self._device.launch(batch)
        sample = pending.sample

        def fails(masks: Masks) -> None:
            self._left -= 1
            if self._left == 0:
                raise OutOfMemory("no room for the sampling")
            sample(masks)

        pending.sample = fails  # type: ignore[method-assign]
        return pending

    def recover(self) -> bool:
        return True


@ONE_TOKENIZER
def test_what_fails_between_two_steps(
    model: tuple[Path, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that cannot be made, or a sampling without memory, when the next step is scheduled
    already: others end with it, or a token is lost or comes twice."""
    folder, _ = model
    grammar = Grammar.json_schema(PERSON)

    def outputs(core: EngineCore) -> dict[int, Output]:
        return run(core, *(request(id, grammar) for id in range(1, 5)))

    expected = {id: output.tokens for id, output in outputs(make_core(folder)).items()}

    core = make_core(folder, async_scheduling=True)
    core._runner = LateFailure(core._runner, at=9)
    by_id = outputs(core)
    assert core.stats().out_of_memory == 1
    assert {id: output.tokens for id, output in by_id.items()} == expected

    core = make_core(folder, async_scheduling=True)
    finish_mask, calls = Constraint.finish_mask, 0

    def finish(self: Constraint, mask: Masks) -> str:
        nonlocal calls
        second = core.scheduler.requests.get(2)
        if second is not None and second.constraint is self:
            calls += 1
            if calls >= 5:
                return "grammar_too_complex: too much"
        return finish_mask(self, mask)

    monkeypatch.setattr(Constraint, "finish_mask", finish)
    by_id = outputs(core)
    assert by_id[2].finish == "error" and "too_complex" in by_id[2].deltas[-1].error
    assert by_id[2].tokens == expected[2][:4]
    for id in (1, 3, 4):
        assert by_id[id].tokens == expected[id]


def test_failures_cost_one_request(model: tuple[Path, Tokenizer]) -> None:
    """A grammar that does not compile, an output that does not fit, an abort while it compiles."""
    folder, tokenizer = model
    core = make_core(folder)
    good = Grammar.json_schema(PERSON)
    core.add_request(request(3, good))
    core.abort([3])
    outputs = run(
        core,
        request(1, Grammar.regex("([")),
        request(2, good, output=tokenizer.encode("[[")),
        request(4, good),
    )
    assert outputs[1].finish == "error" and "invalid_grammar" in outputs[1].deltas[-1].error
    assert outputs[2].finish == "error" and "does not fit" in outputs[2].deltas[-1].error
    assert outputs[3].finish == "abort"
    assert outputs[4].finish == "stop"


def test_without_a_tokenizer(tmp_path: Path) -> None:
    """An engine that cannot start, or an answer that pretends."""
    save_model(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").unlink()
    outputs = run(make_core(tmp_path), request(1, Grammar.regex("a")), request(2, None))
    assert "structured_not_supported" in outputs[1].deltas[-1].error
    assert outputs[2].finish in ("stop", "length")


def test_deterministic(tmp_path: Path) -> None:
    """A mode whose kernels are others, and whose sampler is not asked for masks."""
    tokenizer = byte_level()
    folder = save_model(tmp_path, tokenizer)
    core = make_core(folder, deterministic=True)
    grammar = Grammar.json_schema(PERSON)
    together = run(core, *(request(id, grammar) for id in range(1, 4)))
    for id in range(1, 4):
        assert run(core, request(id, grammar))[id].tokens == together[id].tokens
        jsonschema.validate(json.loads(text_of(tokenizer, together[id])), PERSON)


@pytest.mark.slow
def test_through_the_process(tmp_path: Path) -> None:
    """A grammar that is lost on its way to the engine's process, or one that ends it."""
    folder = save_model(tmp_path, byte_level())
    config = {"device": "cpu", "dtype": "float32", "num_blocks": 256, "num_threads": 1}
    good = SamplingParams(structured=Grammar.json_schema(PERSON), n=2, max_tokens=900, logprobs=1)
    bad = SamplingParams(structured=Grammar.regex("(["))
    with LLM(folder, tokenizer=byte_level(), **config) as llm:
        outputs = llm.generate(["the cat", "the dog", "the log"], [good, bad, SamplingParams()])
    for choice in outputs[0].outputs:
        jsonschema.validate(json.loads(choice.text), PERSON)
        assert choice.finish_reason == "stop"
    assert len({choice.text for choice in outputs[0].outputs}) == 2
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[2].outputs[0].finish_reason in ("stop", "length")


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_on_the_device(tmp_path: Path, graphs: bool) -> None:
    """A recorded forward pass whose sampling is not the one that waits for masks; a mask that is
    overwritten before it is read."""
    tokenizer = byte_level()
    folder = save_model(tmp_path, tokenizer)
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="bfloat16", num_blocks=512, max_num_seqs=32,
        cuda_graphs=graphs,
    )  # fmt: skip
    core = build(config)[0]
    grammar = Grammar.json_schema(PERSON)
    plain = [request(id, None, max_tokens=50, ignore_eos=True) for id in range(40, 48)]
    outputs = run(core, *(request(id, grammar, top_k=20 * (id % 2)) for id in range(1, 25)), *plain)
    for id in range(1, 25):
        assert outputs[id].finish == "stop"
        jsonschema.validate(json.loads(text_of(tokenizer, outputs[id])), PERSON)
    assert all(len(outputs[id].tokens) == 50 for id in range(40, 48))


@pytest.mark.gpu
def test_recorded_choices_are_those_of_kernels_one_by_one(tmp_path: Path) -> None:
    """A recorded choice that reads a mask of another row or step, or the masks of more rows than
    there are; greedy rows, or rows without a grammar, that masks change."""
    folder = save_model(tmp_path, byte_level())
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="bfloat16", num_blocks=512, max_num_seqs=32,
        deterministic=True,
    )  # fmt: skip
    core = build(config)[0]
    grammar = Grammar.json_schema(PERSON)
    graphs = core._runner.graphs  # type: ignore[attr-defined]
    recorded = 0

    def counted(size: tuple[int, int], choose: Any = graphs.choose_masked) -> Any:
        nonlocal recorded
        recorded += 1
        return choose(size)

    graphs.choose_masked = counted
    texts = []
    for logprobs in (None, 0):  # whose log-probabilities are wanted, are sampled kernel by kernel
        before = recorded
        requests = [
            request(
                id, grammar if id % 3 else None, max_tokens=20 + id, ignore_eos=True,
                temperature=1.3 * (id % 2), logprobs=logprobs,
            )
            for id in range(1, 28)
        ]  # fmt: skip
        texts.append({id: output.tokens for id, output in run(core, *requests).items()})
        assert (recorded > before) == (logprobs is None)
    assert texts[0] == texts[1]
