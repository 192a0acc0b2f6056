"""langchain-openai against a server: python with_langchain.py URL; prints what it got as JSON."""

import json
import sys

import langchain_openai
from langchain_core.messages import HumanMessage, SystemMessage

url = sys.argv[1]
settings = {"base_url": f"{url}/v1", "api_key": "none", "model": "embedded", "temperature": 0, "max_tokens": 24}
messages = [SystemMessage("be brief"), HumanMessage("Tell a story")]
chat = langchain_openai.ChatOpenAI(**settings)
plain = langchain_openai.OpenAI(**settings)
responses = langchain_openai.ChatOpenAI(use_responses_api=True, **settings)
usage = chat.invoke(messages).usage_metadata
scored = chat.bind(logprobs=True, top_logprobs=2).invoke(messages).response_metadata["logprobs"]["content"]
texts = {
    "chat": chat.invoke(messages).content,
    "chat, streamed": "".join(c.content for c in chat.stream(messages)),
    "chat, in a batch": chat.batch([messages, messages])[1].content,
    "responses": responses.invoke(messages).content[0]["text"],
    "completion": plain.invoke("def add(a, b):"),
    "completion, streamed": "".join(plain.stream("def add(a, b):")),
}
print(json.dumps({"texts": texts, "tokens": usage["output_tokens"], "scored": len(scored)}))
