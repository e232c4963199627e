"""Conversion of protobuf requests to HTTP bodies, and of the HTTP API's answers to protobuf."""

import base64
import json
from typing import Any

from deployments.api.http.errors import invalid, wrong_type
from deployments.router.rpc.proto_file import message

Answer, ModelList = message("Answer"), message("ModelList")


def body_of(request: Any, default_model: str) -> dict[str, Any]:
    """Return the HTTP body of a ChatRequest or GenerateRequest. Raises ApiError 400 that names the
    field.

    default_model: the model of a request that names none.
    """
    body = _options(request.options)
    chat = request.DESCRIPTOR.name == "ChatRequest"
    own: dict[str, Any] = {"model": request.model or default_model}
    if chat:
        own["messages"] = [_message(item, i) for i, item in enumerate(request.messages)]
        if request.tools:
            own["tools"] = [_tool(item, i) for i, item in enumerate(request.tools)]
        if request.tool_choice:
            own["tool_choice"] = _choice(request.tool_choice)
    elif request.WhichOneof("prompt") == "token_ids":
        own["prompt"] = list(request.token_ids.ids)
    elif request.WhichOneof("prompt") == "text":
        own["prompt"] = request.text
    own |= _sampling(request.sampling, chat)
    for name in own.keys() & body.keys():
        raise invalid(f"{name} is in options, and a field of its own", name, "conflicting_fields")
    return body | own


def _options(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raise invalid("options must be a JSON object in text", "options", "invalid_json") from None
    if not isinstance(parsed, dict):
        raise wrong_type("options", "a JSON object in text")
    if "stream" in parsed:
        raise invalid("the method decides whether answers are streamed", "options.stream")
    return parsed


def _message(one: Any, index: int) -> dict[str, Any]:
    body: dict[str, Any] = {"role": one.role}
    if one.parts:
        place = f"messages[{index}].parts"
        if one.HasField("content"):
            raise invalid(f"{place}: the message has content as well", place, "conflicting_fields")
        parts = enumerate(one.parts)
        body["content"] = [_content_part(part, f"{place}[{number}]") for number, part in parts]
    for name in ("content", "reasoning_content", "tool_call_id", "name"):
        if one.HasField(name):
            body[name] = getattr(one, name)
    if one.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in one.tool_calls
        ]
    return body


def _content_part(part: Any, place: str) -> dict[str, Any]:
    """Return a part of a chat message's content as JSON. Raises ApiError 400 for an empty part.

    place: path of the part's field in the request, for errors.
    """
    kind = part.WhichOneof("part")
    if kind == "text":
        return {"type": "text", "text": part.text}
    if kind == "video":
        frames = [
            _url(frame, f"{place}.video.frames[{number}]", "")
            for number, frame in enumerate(part.video.frames)
        ]
        video: dict[str, Any] = {"type": "video", "video": frames}
        if part.video.HasField("fps"):
            video["fps"] = part.video.fps
        return video
    image = {"url": _url(part.image, place, "a text, a video, or an image with ")}
    if part.image.detail:
        image["detail"] = part.image.detail
    return {"type": "image_url", "image_url": image}


def _url(file: Any, place: str, others: str) -> str:
    """Return the URL of an Image or Frame message; bytes become a data: URL. Raises ApiError 400 if
    the message has neither data nor url.

    place: path of the field in the request, for errors.
    others: the fields that are allowed here instead of the image, for the error.
    """
    source = file.WhichOneof("source")
    if source is None:
        raise invalid(f"{place} must have {others}data or url", place)
    if source == "data":
        return f"data:;base64,{base64.b64encode(file.data).decode()}"
    return str(file.url)


def _tool(one: Any, index: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": one.name}
    if one.description:
        function["description"] = one.description
    if one.strict:
        function["strict"] = True
    if one.parameters:
        where = f"tools[{index}].parameters"
        try:
            function["parameters"] = json.loads(one.parameters)
        except (ValueError, RecursionError):
            raise invalid(f"{where} must be JSON in text", where, "invalid_json") from None
    return {"type": "function", "function": function}


def _choice(text: str) -> Any:
    if text in ("auto", "none", "required"):
        return text
    return {"type": "function", "function": {"name": text}}


def _sampling(sampling: Any, chat: bool) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for field, value in sampling.ListFields():
        # Repeated fields are protobuf containers, which are converted to lists.
        body[field.name] = value if isinstance(value, int | float | str) else list(value)
    if chat and "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return body


def answer_of(event: dict[str, Any]) -> Any:
    """Return the protobuf Answer of an HTTP response's JSON, or of one event of a stream."""
    answer = Answer(id=event["id"], model=event["model"], created=event["created"])
    answer.event_id = event.get("event_id", "")
    for choice in event["choices"]:
        shown = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        added = answer.choices.add(
            index=choice["index"],
            text=shown.get("content") or "",
            reasoning=shown.get("reasoning_content") or "",
            token_ids=choice.get("token_ids") or (),
            finish_reason=choice["finish_reason"] or "",
        )
        if choice.get("stop_reason") is not None:
            added.stop_reason = str(choice["stop_reason"])
        for i, call in enumerate(shown.get("tool_calls") or ()):
            function = call.get("function") or call.get("custom") or {}
            added.tool_calls.add(
                index=call.get("index", i),
                id=call.get("id", ""),
                name=function.get("name", ""),
                arguments=function.get("arguments", function.get("input", "")),
            )
        _add_logprobs(added, choice.get("logprobs"))
    usage = event.get("usage")
    if usage is not None:
        answer.usage.prompt_tokens = usage["prompt_tokens"]
        answer.usage.completion_tokens = usage["completion_tokens"]
        answer.usage.total_tokens = usage["total_tokens"]
        answer.usage.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        details = usage.get("completion_tokens_details") or {}
        answer.usage.reasoning_tokens = details.get("reasoning_tokens", 0)
    return answer


def _add_logprobs(choice: Any, logprobs: dict[str, Any] | None) -> None:
    if logprobs is None:
        return
    for entry in logprobs.get("content") or ():
        added = choice.logprobs.add(token=entry["token"], logprob=entry["logprob"])
        for other in entry["top_logprobs"]:
            added.top.add(token=other["token"], logprob=other["logprob"])
    for token, logprob, top in zip(
        logprobs.get("tokens") or (),
        logprobs.get("token_logprobs") or (),
        logprobs.get("top_logprobs") or (),
        strict=True,
    ):
        added = choice.logprobs.add(token=token, logprob=logprob or 0.0)
        for other, value in (top or {}).items():
            added.top.add(token=other, logprob=value)


def models_of(listed: dict[str, Any]) -> Any:
    models = ModelList()
    for card in listed["data"]:
        models.models.add(
            id=card["id"],
            created=card["created"],
            parent=card["parent"] or "",
            max_model_len=card["max_model_len"],
        )
    return models
