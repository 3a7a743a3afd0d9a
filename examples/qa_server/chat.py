"""A conversation with the server through OpenAI's own client: one answer at once, one streamed.

pip install openai; then: python chat.py --url http://127.0.0.1:8000 --key-file key
"""

from __future__ import annotations

import argparse
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key-file")
    args = parser.parse_args()
    key = Path(args.key_file).read_text().strip() if args.key_file else "none"
    client = OpenAI(base_url=f"{args.url}/v1", api_key=key)
    model = client.models.list().data[0].id

    question = {"role": "user", "content": "How many days of paid annual leave are there in 2025?"}
    answer = client.chat.completions.create(model=model, messages=[question], max_tokens=32)
    print(answer.choices[0].message.content)
    for number, citation in enumerate(answer.citations, start=1):
        print(f"  [{number}] {citation['doc_id']}: {citation['quote']}")

    stream = client.chat.completions.create(
        model=model, messages=[question], stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:  # the last one; it holds the citations as well
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n{len(chunk.citations)} sources, {cached} of {chunk.usage.prompt_tokens} tokens from the store")


if __name__ == "__main__":
    main()
