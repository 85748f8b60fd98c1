"""Talk to a running server (`pelton serve smollm2`) with the openai package.

python examples/scripts/openai_client.py [http://127.0.0.1:8000/v1]
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="unused")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_completion_tokens=32,
    temperature=0,
)
print(answer.choices[0].message.content)
print(answer.usage)

chunks = client.completions.create(model=model, prompt="Once upon a time", max_tokens=16, temperature=0, stream=True)
for chunk in chunks:
    print(chunk.choices[0].text, end="", flush=True)
print()
