"""Registry of length policies: how many tokens a drafter may guess. One file, one policy: its class is `POLICY`.

`POLICY.build(num_draft_tokens, confidence, measure)` makes one; `measure()` times passes of the target. Any rule is
lossless here: acceptance never looks at why a draft ended.
"""
