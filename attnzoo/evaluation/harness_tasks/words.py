"""Words of generated prompts: 4,096 pairs of an adjective and a noun, such as ``calm-river``."""

from __future__ import annotations

ADJECTIVES = """
able amber ancient bitter blank blue bold brave brief bright calm careful clever cold cool
crisp dark deep dry eager early empty fair famous fast final fine firm flat fresh gentle
giant glad golden grand green grey happy heavy hidden hollow honest huge humble kind late
lazy light lively lone loud lucky modest narrow neat noble odd pale plain proud quick quiet
rare round
"""
NOUNS = """
anchor apple arrow badge barrel basket beach bell boat bottle branch bread bridge brush
button cabin candle canyon castle chair circle cloud coast comet copper cradle desert engine
falcon feather field flame forest garden glacier hammer harbor island jacket kettle ladder
lantern lemon market meadow mirror mountain needle orchard paper pencil pillow planet pocket
river saddle shadow silver spoon statue thunder tunnel valley window
"""
WORDS = tuple(f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split())
