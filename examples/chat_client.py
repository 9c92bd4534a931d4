"""A conversation over the client library: python examples/chat_client.py [ADDRESS]. An empty line ends it.

Each turn sends the whole conversation; the cluster computes only what is new, and says how much it had.
"""

import sys

from pdactors import Client, PDError

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:7071"


def main() -> None:
    messages: list[dict[str, str]] = []
    with Client(ADDRESS) as client:
        while text := (sys.stdin.readline() if not sys.stdin.isatty() else input("you> ")).strip():
            messages.append({"role": "user", "content": text})
            answer = ""
            for event in client.events(messages=messages, max_tokens=128):
                if hasattr(event, "text"):
                    answer += event.text
                    print(event.text, end="", flush=True)
                else:
                    print(f"\n  [{event.usage.cached_tokens} of {event.usage.prompt_tokens} prompt tokens were cached]")
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    try:
        main()
    except PDError as error:
        sys.exit(f"{error.code}: {error}")
