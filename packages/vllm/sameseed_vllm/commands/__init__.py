"""The commands of sameseed-vllm."""
