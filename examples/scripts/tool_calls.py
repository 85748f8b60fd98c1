"""Let a model call a function: the request, the call, its result, the answer.

pelton serve Qwen/Qwen3-0.6B --tool-call-parser hermes --reasoning-parser think
python examples/scripts/tool_calls.py [BASE_URL]
"""

import json
import sys

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Say what the weather is like in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Lima", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str) -> str:
    return f"It rains in {city}, and it is 12 degrees."


client = openai.OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather like in Paris?"}]
first = client.chat.completions.create(
    model=model, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
)
message = first.choices[0].message
messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
for call in message.tool_calls or ():
    print(f"The model calls {call.function.name}({call.function.arguments})")
    result = get_weather(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = client.chat.completions.create(
    model=model, messages=messages, tools=TOOLS, tool_choice="none", max_completion_tokens=64
)
print(answer.choices[0].message.content)
