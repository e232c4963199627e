"""HarnessModel: an adapter of `LLM` to lm-evaluation-harness, which the extra `eval` installs."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from engine.errors import ConfigError, InvalidRequest, RequestFailed
from engine.library.llm import LLM
from engine.library.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

_SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
_CHUNK = 256  # maximum number of prompts whose log-probabilities are in memory at once
_MAX_TOKENS = 256  # maximum number of answer tokens for a task without a limit, as in the library

Pair = tuple[Any, list[int], list[int]]  # the library's (key, context tokens, continuation tokens)


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the library has no types
    """A model for `lm_eval.simple_evaluate(model=HarnessModel(llm))`.

    Texts are tokenised, and truncated at their beginning, as lm-evaluation-harness's model `hf`
    does.
    Raises ConfigError for a model without a tokenizer, or without a first token for an empty
    context.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._llm = llm
        self._tokenizer = _tokenizer(llm)
        # The engine always samples a token, which needs a position after the prompt.
        self._longest = llm.ready.max_model_len - 1
        own = self._tokenizer.token_id(self._tokenizer.special_tokens.get("eos_token", ""))
        ends = [*([] if own is None else [own]), *self._tokenizer.eos_token_ids]
        first = self._tokenizer.bos_token_id
        starts = [*([] if first is None else [first]), *ends]
        if not starts:
            raise ConfigError(
                "the tokenizer names neither bos_token nor eos_token, and a text needs one before "
                "it: add one to tokenizer_config.json",
                param="model",
            )
        self._prefix, self._end = starts[0], (ends or starts)[0]
        self._prefix_text = self._tokenizer.decode([self._prefix], skip_special_tokens=False)
        self._end_text = self._tokenizer.decode([self._end], skip_special_tokens=False)

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a text."""
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that serves as the context of a text without one."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """The model's folder as one name, for the library's caches of requests."""
        return self._llm.config.model.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return "", which stands for the model's own template in `apply_chat_template`."""
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat rendered by the model's template. Raises ConfigError if it has none."""
        template = self._tokenizer.chat_template
        if template is None:
            raise ConfigError(
                "the model has no chat template: leave --chat-template out", param="model"
            )
        return template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Encode a text.

        add_special_tokens: None adds the tokenizer's special tokens unless the text begins with
            them.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._prefix_text)
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Return, for each request, (log-probability of the continuation, whether it is greedy)."""
        results: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), desc="Log-likelihoods", disable=disable_tqdm) as bar:
            for start in range(0, len(requests), _CHUNK):
                chunk = requests[start : start + _CHUNK]
                prompts = [(context + scored)[-self._longest :] for _, context, scored in chunk]
                for (_, _, scored), prompt in zip(chunk, prompts, strict=True):
                    if len(scored) >= len(prompt):
                        raise InvalidRequest(
                            f"a continuation of {len(scored)} tokens has no room behind a context "
                            f"of one token or more: max_model_len allows {self._longest} in all",
                            param="max_model_len",
                            code="context_length_exceeded",
                        )
                outputs = self._generate(prompts, [_SCORED] * len(prompts))
                for (_, _, scored), output in zip(chunk, outputs, strict=True):
                    results.append(_score(output, len(scored)))
                bar.update(len(chunk))
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each whole text, computed in windows of the context
        length."""
        pairs: list[Pair] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._longest - 1,  # the last token of a window is only predicted
                context_len=1,
            )
            before = len(pairs)
            pairs += ((None, *make_disjoint_window(window)) for window in windows)
            counts.append(len(pairs) - before)
        scores = iter(self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first of the request's `until`."""
        prompts, params = [], []
        # the seed differs, so that repeats of a sampled answer differ
        for seed, request in enumerate(requests):
            context, options = request.args
            settings = self._settings(options, seed)
            room = self._longest + 1 - (settings.max_tokens or 0)
            if room < 1:
                raise InvalidRequest(
                    f"generation_kwargs: max_gen_toks is {settings.max_tokens}, and max_model_len "
                    f"allows {self._longest}; raise the one or lower the other",
                    param="max_model_len",
                    code="context_length_exceeded",
                )
            prompts.append(self.tok_encode(context)[-room:])
            params.append(settings)
        outputs = self._generate(prompts, params, None if not disable_tqdm else False)
        return [
            postprocess_generated_text(
                output.outputs[0].text, [*settings.stop, self._end_text], None
            )
            for output, settings in zip(outputs, params, strict=True)
        ]

    def _settings(self, options: dict[str, Any], seed: int) -> SamplingParams:
        """Return the sampling parameters of a task's generation_kwargs."""
        values: dict[str, Any] = dict(normalize_gen_kwargs(options, _MAX_TOKENS))
        stop = tuple(text for text in values.pop("until") if text)
        max_tokens = values.pop("max_gen_toks")
        if values.pop("do_sample"):
            values.setdefault("temperature", 1.0)
        else:
            values["temperature"] = 0.0
        if values.get("num_beams") == 1:
            del values["num_beams"]
        if unknown := sorted(values.keys() - set(SamplingParams.__struct_fields__)):
            raise ConfigError(
                f"generation_kwargs: the engine has no {unknown[0]}; take it out of the task",
                param="generation_kwargs",
            )
        return SamplingParams(**{"seed": seed, **values, "stop": stop, "max_tokens": max_tokens})

    def _generate(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        progress: bool | None = False,
    ) -> list[RequestOutput]:
        outputs = self._llm.generate(prompts, params, progress=progress)
        for output in outputs:
            choice = output.outputs[0]
            if choice.finish_reason not in ("stop", "length"):
                code, _, message = choice.error.partition(": ")
                raise RequestFailed(message or "the text was given up", code=code or "aborted")
        return outputs


def _tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise ConfigError("tasks are texts, and the model has no tokenizer", param="model")
    return llm.tokenizer


def _score(output: RequestOutput, count: int) -> tuple[float, bool]:
    """Return (log-probability of a prompt's last `count` tokens, whether each is the most
    likely)."""
    assert output.prompt_logprobs is not None
    tokens = [token for token in output.prompt_logprobs[-count:] if token] if count else []
    return sum(token.logprob for token in tokens), all(token.rank == 1 for token in tokens)
