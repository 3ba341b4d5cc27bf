"""Time and memory of SphereNets beside their CNN twins and the authors' formulation."""
