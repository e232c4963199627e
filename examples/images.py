"""A question about pictures: `python examples/images.py FILE... [URL]`. Needs `pip install openai`.

The served model has to see images: docs/images.md.
"""

import base64
import sys
from pathlib import Path

from openai import OpenAI

*files, url = sys.argv[1:] if "://" in sys.argv[-1] else [*sys.argv[1:], "http://127.0.0.1:8000/v1"]
client = OpenAI(base_url=url, api_key="none")  # with keys, one of these
model = client.models.list().data[0].id
content = [{"type": "text", "text": "What do these pictures have in common?"}]
for file in files:
    data = base64.b64encode(Path(file).read_bytes()).decode()
    # The type in a data: URL is not read: a JPEG may be sent like this too.
    image = {"url": f"data:image/png;base64,{data}", "detail": "low"}
    content.append({"type": "image_url", "image_url": image})
answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": content}], max_tokens=60
)
print(answer.choices[0].message.content)
print(f"{answer.usage.prompt_tokens} tokens of question and pictures")
