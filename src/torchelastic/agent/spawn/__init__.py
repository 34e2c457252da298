"""Agent and zygote: where a node's processes come from, warm from the zygote or plain."""
