"""What only the papers ask: their figures, and the studies behind them."""
