from . import functional as functional
from . import ops as ops
from .layers import LazySphereConv1d as LazySphereConv1d
from .layers import LazySphereConv2d as LazySphereConv2d
from .layers import LazySphereConv3d as LazySphereConv3d
from .layers import LazySphereLinear as LazySphereLinear
from .layers import SphereConv1d as SphereConv1d
from .layers import SphereConv2d as SphereConv2d
from .layers import SphereConv3d as SphereConv3d
from .layers import SphereLayer as SphereLayer
from .layers import SphereLinear as SphereLinear
from .ops.angle_functions import AngleFunction as AngleFunction
from .ops.angle_functions import CosineAngle as CosineAngle
from .ops.angle_functions import CustomAngle as CustomAngle
from .ops.angle_functions import LearnableSigmoidAngle as LearnableSigmoidAngle
from .ops.angle_functions import LinearAngle as LinearAngle
from .ops.angle_functions import SigmoidAngle as SigmoidAngle

__version__: str
