"""Registry of length policies: how many tokens a drafter may guess. One file, one policy: its class is `POLICY`.

Any rule is lossless here: acceptance never looks at why a draft ended.
"""
