"""A file of requests that the server answers when it has room: `python examples/batch.py [URL]`.

The server's configuration needs `batch: {folder: /some/folder}`. Needs `pip install openai`."""

import io
import json
import sys
import time

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id
lines = [
    {
        "custom_id": f"question-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": f"Say {number} in words."}],
            "max_tokens": 16,
        },
    }
    for number in range(10)
]
content = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
source = client.files.create(file=("questions.jsonl", content), purpose="batch")
batch = client.batches.create(
    input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
if batch.status != "completed" or batch.output_file_id is None:
    sys.exit(f"the batch has ended as {batch.status}")
for line in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(line)
    print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"])
