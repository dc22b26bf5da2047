"""Long sequences against float64, on one GPU or several; offsets past 2³¹ elements; positions past 2²⁴."""
