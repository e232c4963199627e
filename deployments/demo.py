"""`make demo`: serve the default model, print one streamed answer, and serve until Ctrl-C."""

import sys
import time
from pathlib import Path

from deployments.cli import chat
from deployments.cli import serve as command
from deployments.config.load import MantaConfig
from engine.errors import ConfigError, MantaError

CONFIG = Path(__file__).parent / "configs" / "default.yaml"
QUESTION = "Write two sentences about the sea."


def main() -> int:
    """Serve the default model, print an answer, and return the exit code. With --once, stop after
    the answer."""
    started = time.monotonic()

    def ask(url: str, config: MantaConfig) -> bool:
        print(f"\nYou: {QUESTION}\n{config.name()}: ", end="", flush=True)
        body = {"model": config.name(), "max_tokens": 64, "temperature": 0}
        messages = [{"role": "user", "content": QUESTION}]
        first = chat.answer(chat.ChatServer(url), body, messages).first_token
        print(f"\nFirst token {first - started:.1f} s after the start.", file=sys.stderr)
        return "--once" not in sys.argv[1:]

    try:
        return command.run(str(CONFIG), address="local", once_ready=ask)
    except MantaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
