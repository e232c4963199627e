"""OutputPlan: creates the parser and the grammar for the text of a chat's answer."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from deployments.api.body_fields import name_fields
from deployments.api.http.errors import ApiError, invalid
from deployments.api.output.channel_parser import ChannelParser
from deployments.api.output.constraints import RequestedGrammar
from deployments.api.output.detect import template_output
from deployments.api.output.grammar import Function, json_content, output_grammar
from deployments.api.output.output_format import OutputFormat, Reasoning, quoted
from deployments.api.output.parser import OutputParser, Thinking
from deployments.api.output.request import RequestedTools
from deployments.api.output.step_parser import StepParser
from engine.structured.grammar import Grammar
from engine.structured.thinking import ThinkingBudget
from engine.text.tokenizer import Tokenizer

_ENDS = re.compile(r"\\.|/|\n", re.DOTALL)
_TAIL = 24  # number of tokens at a prompt's end in which delimiters of reasoning are searched

Compile = Callable[[RequestedGrammar], tuple[Grammar, list[str]]]


@dataclass(slots=True)
class OutputPlan:
    """The plan for the text of a chat's answer: it creates the parser and the grammar.

    format, reasoning, thinking: see OutputParser
    tools: the tools of the request; None if it has none
    raw: see OutputParser
    shown_ids: the ids of control tokens that detokenised text must contain for the parser
    """

    tokenizer: Tokenizer
    format: OutputFormat | None
    reasoning: Reasoning | None
    thinking: Thinking
    tools: RequestedTools | None
    shown_ids: frozenset[int]
    wrapper: tuple[str, ...] = ()  # see OutputParser
    raw: dict[str, frozenset[str]] = field(default_factory=dict)
    budget: int | None = None  # maximum number of reasoning tokens
    shows_reasoning: bool = True  # whether reasoning is returned in the answer
    limited: bool = False  # whether the request constrains the content

    @property
    def custom(self) -> frozenset[str]:
        """The names of custom tools, which take a text."""
        tools = self.tools.tools if self.tools is not None else ()
        return frozenset(tool.name for tool in tools if tool.custom)

    @property
    def calls(self) -> bool:
        """Whether the model may emit tool calls."""
        return self.tools is not None and self.tools.mode != "none"

    @property
    def channels(self) -> bool:
        return self.reasoning is not None and self.reasoning.channels

    def parser(self) -> StepParser:
        if self.channels:
            return ChannelParser(calls=self.calls, limited=self.limited)
        format = self.format if self.calls else None
        marks = (self.reasoning, self.thinking, self.wrapper)
        return OutputParser(format, self.raw, *marks, self.limited)

    def needs_grammar(self, constraint: RequestedGrammar | None) -> bool:
        limited = constraint is not None or self.budget is not None
        return self.tools is not None or (limited and self.thinking != "no")

    @property
    def thinking_budget(self) -> ThinkingBudget | None:
        """The limit of reasoning tokens in the engine's form; None: no limit."""
        if self.budget is None or self.reasoning is None or self.thinking == "no":
            return None
        # In a format with channels, a call follows the control token that ends a message. So the
        # call does not end reasoning.
        ended = self.format is not None and self.calls and not self.channels
        trigger = self.format.trigger if ended and self.format is not None else ""
        start = self.reasoning.start if self.thinking == "may" else ""
        end = tuple(self.tokenizer.encode(self.reasoning.end))
        ends = (self.reasoning.end, trigger) if trigger else (self.reasoning.end,)
        return ThinkingBudget(self.budget, end, ends, start)

    def grammar(
        self, constraint: RequestedGrammar | None, compile: Compile
    ) -> tuple[Grammar, list[str]]:
        """Return the grammar of the whole output, and the names of fields that are not enforced.

        compile: compiles the constraint of one field; takes milliseconds

        Raises ApiError 400, InvalidRequest.
        """
        ignored: list[str] = []
        functions = []
        tools = self.tools
        for tool in tools.tools if tools is not None and self.calls else ():
            assert tools is not None
            if tool.name not in tools.callable:
                continue
            asked = RequestedGrammar(tool.where, "json", tool.schema, tool.strict)
            schema, left_out = compile(asked)
            ignored += name_fields(left_out, f"{tool.where}#")
            function = Function(tool.name, msgspec.json.decode(schema.text))
            if tool.grammar:
                # The grammar is enforced only if the text is written verbatim: a grammar cannot
                # express the escapes of a JSON string.
                if function.raw(self.format):
                    compile(RequestedGrammar(tool.where, "grammar", tool.grammar))
                    function = replace(function, grammar=tool.grammar)
                else:
                    ignored += name_fields([tool.where])
            functions.append(function)
        if self.format is not None:
            self.raw.update((declared.name, declared.raw(self.format)) for declared in functions)
        content = ""
        required = tools is not None and tools.mode == "required"
        if constraint is not None:
            if constraint.kind == "tags":
                raise _not_beside(constraint.where)
            inner, left_out = compile(constraint)
            ignored += constraint.ignored + name_fields(left_out, f"{constraint.where}#")
            content = self._content(inner, constraint.where)
            untold = self.format is not None and not self.format.trigger and not required
            if functions and untold and inner.kind == "json_schema":
                raise invalid(
                    f"{constraint.where}: this model's calls cannot be told from a document; "
                    'give no tools, or tool_choice "none" or "required"',
                    constraint.where,
                    "not_supported",
                )
        text = output_grammar(
            self.tokenizer,
            format=self.format,
            functions=functions,
            required=required,
            parallel=tools is not None and tools.parallel,
            reasoning=self.reasoning,
            thinking=self.thinking,
            once=self.budget is not None,
            content=content,
            wrapper=self.wrapper,
        )
        return Grammar.lark(text), ignored

    def _content(self, grammar: Grammar, where: str) -> str:
        if grammar.kind == "json_schema":
            return json_content(msgspec.json.decode(grammar.text))
        if grammar.kind == "choice":
            return " | ".join(map(quoted, msgspec.json.decode(grammar.text)))
        if grammar.kind == "regex":
            return f"/{_ENDS.sub(_escaped, grammar.text)}/"
        raise _not_beside(where)


def _not_beside(where: str) -> ApiError:
    return invalid(
        f"{where}: a grammar goes neither with tools nor with a model that reasons",
        where,
        "not_supported",
    )


def _escaped(match: re.Match[str]) -> str:
    """Return a slash or line break in a regular expression, escaped or not, in Lark's escaping."""
    return {"/": "\\/", "\n": "\\n"}.get(match[0][-1], match[0])


def plan_output(
    tokenizer: Tokenizer, tools: RequestedTools | None, prompt: list[int], *, generation: bool
) -> OutputPlan | None:
    """Return the plan for a chat's answer; None: the whole text is content, and needs no parser.

    prompt: the token ids of the prompt, rendered with the tools
    generation: whether the prompt ends where the assistant's turn begins
    """
    known = template_output(tokenizer)
    reasoning = known.reasoning if generation else None
    thinking: Thinking = "no"
    if reasoning is not None:
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(reasoning.start):
            thinking = "open"
        elif not tail.endswith(reasoning.end):
            thinking = "may"
    if tools is not None and known.calls is None:
        # The format of calls is unknown, so the mode is none, and the tools are not in the prompt.
        tools = None
    if known.reasoning is not None and known.reasoning.channels and not generation:
        # The answer continues the prompt's last message. In a format with channels, that message
        # contains no calls, because each call is a message of its own.
        return None
    # Wrappers that are special tokens never appear in detokenised text.
    visible = bool(known.wrapper) and tokenizer.token_id(known.wrapper[1]) not in (
        tokenizer.special_ids
    )
    if thinking == "no" and tools is None and not visible:
        return None
    format = known.calls if tools is not None else None
    plan = (reasoning, thinking, tools, known.special_ids, known.wrapper)
    return OutputPlan(tokenizer, format, *plan)
