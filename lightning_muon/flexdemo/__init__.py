"""FlexDeMo: nodes that send each other the fast-moving components of their momenta."""
