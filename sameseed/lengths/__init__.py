"""Registry of length policies: how many tokens a drafter may guess. One file, one policy: its class is `POLICY`.

`POLICY.build(num_draft_tokens, confidence)` makes one; `calibrate(measure)` lets it time rounds of the engine. Any rule
is lossless here: acceptance never looks at why a draft ended.
"""
