"""The flat parameters of one unit: layout, memory, states and gradients. Knows no module hooks and no module tree."""
