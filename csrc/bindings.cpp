// The Python face of the native library (nanobind). Takes plain integers and addresses; who calls it has checked them
// (nn/program/native.py). Nothing here knows numpy or torch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pages.h"
#include "program.h"
#include "shares.h"
#include "step_arrays.h"
#include "weight.h"

namespace nb = nanobind;
using namespace sayfa;

namespace {

using Address = uint64_t;
using MatTuple = std::tuple<Address, int64_t, int64_t>;  // address, stride in floats, width

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Mat mat(const MatTuple& m) { return {at<float>(std::get<0>(m)), std::get<1>(m), std::get<2>(m)}; }

RowRange rows(int space) { return {space ? RowSpace::logits : RowSpace::tokens, 1, INT64_MAX}; }

const Kernels* kernels_or_throw(const std::string& isa) {
  const Kernels* found = find_kernels(isa.c_str());
  if (!found) throw std::invalid_argument("instruction set '" + isa + "' is not compiled in or not runnable here");
  return found;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (auto name = compiled_isas(); *name; ++name)
    if (runnable(*name)) names.emplace_back(*name);
  return names;
}

using PagesTuple = std::tuple<int, int64_t, int, int, int, int>;  // layer, page_stride, heads, dim, page_size, type

KvLayer layer_of(const PagesTuple& p) {
  return {nullptr, std::get<1>(p), std::get<2>(p), std::get<3>(p), std::get<4>(p), static_cast<KvType>(std::get<5>(p))};
}

void bind_memory(nb::module_& m) {
  nb::class_<Block>(m, "Block")
      .def(nb::init<size_t>())
      .def_prop_ro("address", [](const Block& b) { return reinterpret_cast<Address>(b.data()); })
      .def_prop_ro("bytes", &Block::bytes)
      .def("fill", [](Block& b, int byte) { std::memset(b.data(), byte, b.bytes()); })
      // A numpy view of float32 rows; it keeps the block alive.
      .def("rows", [](nb::object self, size_t offset, size_t num_rows, size_t width, size_t stride) {
        const Block& block = nb::cast<const Block&>(self);
        if (width > stride || offset % 4 || offset + num_rows * stride * 4 > block.bytes())
          throw std::invalid_argument("these rows are not inside the block");
        const size_t shape[] = {num_rows, width};
        const int64_t strides[] = {static_cast<int64_t>(stride), 1};
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(block.data() + offset, 2, shape, self, strides);
      });
  nb::class_<Pages>(m, "Pages")
      .def(nb::init<int64_t, int64_t, int64_t>())
      .def("copy", &Pages::copy)
      .def("populate", &Pages::populate, nb::call_guard<nb::gil_scoped_release>())
      .def("fill", [](Pages& p, int byte) { std::memset(p.block.data(), byte, p.block.bytes()); })
      .def_prop_ro("address", [](const Pages& p) { return reinterpret_cast<Address>(p.block.data()); })
      .def_ro("num_pages", &Pages::num_pages)
      .def_prop_ro("bytes", [](const Pages& p) { return p.block.bytes(); });
  // Made apart: Python would place it at a 16-byte address, and its words are meant to have cache lines of their own.
  nb::class_<Pool>(m, "Pool")
      .def(nb::new_([](int count) { return std::make_shared<Pool>(count); }))
      .def_prop_ro("count", &Pool::count);
}

using PieceTuple = std::tuple<Address, int, int64_t>;  // address, type, rows

std::vector<Piece> pieces_of(const std::vector<PieceTuple>& tuples) {
  std::vector<Piece> pieces;
  for (const auto& [address, type, num] : tuples) {
    if (type < 0 || type >= kNumTensorTypes) throw std::invalid_argument("unknown tensor type");
    pieces.push_back({at<const uint8_t>(address), static_cast<TensorType>(type), num});
  }
  return pieces;
}

void bind_weight(nb::module_& m) {
  nb::class_<Weight> c(m, "Weight");
  c.def("__init__", [](Weight* self, const std::vector<PieceTuple>& pieces, int64_t k, int floats, bool paired) {
    new (self) Weight(pieces_of(pieces), k, floats, paired);
  });
  c.def_prop_ro("num_columns", &Weight::num_columns);
  c.def_prop_ro("bytes", &Weight::bytes);
  c.def_prop_ro("formats", &Weight::formats);
  c.def("pack", [](Weight& w, Pool& pool, const std::string& isa, std::shared_ptr<Block> block, int64_t offset) {
    const Kernels* kernels = kernels_or_throw(isa);
    nb::gil_scoped_release released;
    w.pack(pool, *kernels, std::move(block), offset);
  });
  m.def("can_pair", [](const PieceTuple& gate, const PieceTuple& up, int floats) {
    const auto both = pieces_of({gate, up});
    return Weight::can_pair(both[0], both[1], floats);
  });
  m.def("row_formats", [](const std::string& isa, uint32_t formats) {
    return row_formats(formats, kernels_or_throw(isa)->linear.bf16_rows);
  });
  m.def("prepared_bytes", [](int64_t k, uint32_t formats) { return row_layout(k, formats).bytes; });
}

using NormTuple = std::tuple<Address, float>;  // weight (0: no norm), eps

// At most so many rows are prepared by each worker for itself: below it one op more costs more than the work.
constexpr int64_t kSelfPrepareRows = 1;
// Bytes of prepared rows that a block of rows may take: they stay in the second-level cache while panels pass by.
constexpr int64_t kRowBlockBytes = 384 << 10;

PrepareArgs prepare_args(MatTuple x, int space, NormTuple norm, int64_t k, uint32_t formats, Address out) {
  return {mat(x), rows(space).space, at<float>(std::get<0>(norm)), std::get<1>(norm), row_layout(k, formats), at<uint8_t>(out)};
}

void add_linear(Program& p, std::shared_ptr<Weight> weight, MatTuple x, int space, NormTuple norm, uint32_t formats,
                Address prepared, MatTuple out, int epilogue, Address bias) {
  LinearArgs args{};
  args.input = prepare_args(x, space, norm, weight->k(), formats, prepared);
  args.self_prepare_rows = kSelfPrepareRows;
  args.row_block = std::max<int64_t>(48, kRowBlockBytes / std::max<int64_t>(1, args.input.layout.bytes));
  if (!prepared) args.input.layout.f32 = 0;
  args.segments = weight->segments().data();
  args.num_panels = weight->num_panels();
  args.out = mat(out);
  args.epilogue = static_cast<Epilogue>(epilogue);
  args.bias = at<float>(bias);
  p.pool()->reserve_scratch(static_cast<size_t>(args.input.layout.bytes * kSelfPrepareRows + weight->k() * 4));
  p.add("linear", p.kernels().linear.linear, args, rows(space));
  LinearArgs* added = &p.last_args<LinearArgs>();
  if (p.last_linear) p.last_linear->next = added;
  p.last_linear = added;
  p.keep(weight);
}

void bind_linear(nb::class_<Program>& c) {
  c.def("add_embed", [](Program& p, Address table, int type, int64_t vocab, int64_t width, float scale, MatTuple out) {
    p.add("embed", p.kernels().linear.embed, EmbedArgs{at<void>(table), type, vocab, width, scale, mat(out)}, rows(0));
  });
  // Rows are prepared by this op for steps of more than kSelfPrepareRows rows; the products then read them.
  c.def("add_prepare", [](Program& p, MatTuple x, int space, NormTuple norm, int64_t k, uint32_t formats, Address out) {
    RowRange range = rows(space);
    range.min = kSelfPrepareRows + 1;
    p.pool()->reserve_scratch(static_cast<size_t>(k * 4));
    p.add("prepare", p.kernels().linear.prepare, prepare_args(x, space, norm, k, formats, out), range);
  });
  c.def("add_linear", &add_linear);
}

void bind_small_ops(nb::class_<Program>& c) {
  c.def("add_rms_norm", [](Program& p, MatTuple x, MatTuple out, Address weight, float eps, int space) {
    p.add("rms_norm", p.kernels().ops.rms_norm,
          RmsNormArgs{mat(x), mat(out), at<float>(weight), eps, rows(space).space}, rows(space));
  });
  c.def("add_head_norm", [](Program& p, MatTuple x, int heads, int dim, Address weight, float eps) {
    p.add("head_norm", p.kernels().ops.head_norm, HeadNormArgs{mat(x), heads, dim, at<float>(weight), eps}, rows(0));
  });
  c.def("add_rope", [](Program& p, MatTuple x, int heads, int dim, int rotary, Address cos, Address sin, bool adjacent) {
    p.add("rope", p.kernels().ops.rope,
          RopeArgs{mat(x), heads, dim, rotary, at<float>(cos), at<float>(sin), adjacent}, rows(0));
  });
  c.def("add_act_mul", [](Program& p, MatTuple x, MatTuple out, int act) {
    p.add("act_mul", p.kernels().ops.act_mul, ActMulArgs{mat(x), mat(out), act}, rows(0));
  });
  c.def("add_add", [](Program& p, MatTuple x, MatTuple y, int space) {
    p.add("add", p.kernels().ops.add, AddArgs{mat(x), mat(y), rows(space).space}, rows(space));
  });
  c.def("add_gather", [](Program& p, MatTuple x, MatTuple out) {
    p.add("gather", p.kernels().ops.gather, GatherArgs{mat(x), mat(out)}, rows(1));
  });
}

void bind_attention(nb::class_<Program>& c) {
  c.def("add_kv_write", [](Program& p, MatTuple key, MatTuple value, PagesTuple pages) {
    p.add("kv_write", p.kernels().ops.kv_write, KvWriteArgs{mat(key), mat(value), layer_of(pages)}, rows(0));
    p.add_pages_user(&p.last_args<KvWriteArgs>().layer, std::get<0>(pages));
  });
  c.def("add_attention",
        [](Program& p, MatTuple query, MatTuple out, PagesTuple pages, int heads, float scale, int window, int max_tokens,
           int max_rows, std::shared_ptr<Block> partials) {
          AttentionArgs args{mat(query), mat(out), layer_of(pages), heads, scale, window, nullptr, 0};
          if (partials) {
            args.partials = partials->data();
            args.partials_bytes = partials->bytes();
            p.keep(partials);
          }
          p.add("attention", p.kernels().ops.attention, args, rows(0));
          p.add_pages_user(&p.last_args<AttentionArgs>().layer, std::get<0>(pages));
          p.pool()->reserve_scratch(p.kernels().ops.attention_scratch_bytes(args, max_tokens, max_rows));
        },
        nb::arg("query"), nb::arg("out"), nb::arg("pages"), nb::arg("heads"), nb::arg("scale"), nb::arg("window"),
        nb::arg("max_tokens"), nb::arg("max_rows"), nb::arg("partials").none());
  c.def("attention_partials_bytes", [](const Program& p, PagesTuple pages, int heads, float scale, int window) {
    return p.kernels().ops.attention_partials_bytes({{}, {}, layer_of(pages), heads, scale, window, nullptr, 0});
  });
  c.def("kv_page_bytes", [](const Program& p, PagesTuple pages) { return p.kernels().ops.kv_page_bytes(layer_of(pages)); });
  c.def("set_pages", [](Program& p, Pages& pages) {
    p.set_pages(pages.block.data(), pages.num_pages * pages.page_stride, static_cast<int32_t>(pages.num_pages));
  }, nb::keep_alive<1, 2>());
}

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntRows = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Raises ValueError with the field and the limit before any kernel runs.
void run(Program& p, Ints token_ids, Ints positions, Ints slots, Ints query_start, Ints context_len, IntRows page_table,
         Ints logit_rows) {
  const size_t T = token_ids.shape(0), S = context_len.shape(0), P = page_table.shape(1), L = logit_rows.shape(0);
  if (T > INT32_MAX || S > INT32_MAX || P > INT32_MAX || L > INT32_MAX) throw std::invalid_argument("the batch is too large");
  if (positions.shape(0) != T || slots.shape(0) != T) throw std::invalid_argument("positions and slots need one entry per token");
  if (query_start.shape(0) != S + 1) throw std::invalid_argument("query_start needs one entry more than context_len");
  if (page_table.shape(0) != S) throw std::invalid_argument("page_table needs one row per row of context_len");
  const Batch batch{token_ids.data(), positions.data(), slots.data(), query_start.data(), context_len.data(),
                    page_table.data(), logit_rows.data(), static_cast<int32_t>(T), static_cast<int32_t>(S),
                    static_cast<int32_t>(P), static_cast<int32_t>(L), p.limits.page_size};
  const std::string bad = p.check(batch);
  if (!bad.empty()) throw std::invalid_argument(bad);
  nb::gil_scoped_release released;
  p.run(batch);
}

// For tests: the runs of a batch as (members, first block, block behind the last).
std::vector<std::tuple<std::vector<int32_t>, int32_t, int32_t>> shared_runs(Ints query_start, Ints context_len,
                                                                            IntRows page_table, int page_size) {
  Batch batch{};
  batch.query_start = query_start.data();
  batch.context_len = context_len.data();
  batch.page_table = page_table.data();
  batch.S = static_cast<int32_t>(context_len.shape(0));
  batch.P = static_cast<int32_t>(page_table.shape(1));
  batch.page_size = page_size;
  SharedPrefixes found;
  found.find(batch);
  std::vector<std::tuple<std::vector<int32_t>, int32_t, int32_t>> runs;
  for (const SharedRun& run : found.runs()) {
    const auto first = found.members().begin() + run.first;
    runs.emplace_back(std::vector<int32_t>(first, first + run.members), run.block_begin, run.block_end);
  }
  return runs;
}

void bind_program(nb::module_& m) {
  m.def("shared_runs", &shared_runs);
  nb::class_<Program> c(m, "Program");
  c.def("__init__", [](Program* self, std::shared_ptr<Pool> pool, const std::string& isa) {
    new (self) Program(std::move(pool), kernels_or_throw(isa));
  });
  c.def_prop_ro("isa", [](const Program& p) { return p.kernels().name; });
  c.def_prop_ro("num_ops", &Program::num_ops);
  c.def("join_last", &Program::join_last);
  c.def("set_timing", &Program::set_timing);
  c.def("timings", &Program::timings);
  bind_linear(c);
  bind_small_ops(c);
  bind_attention(c);
  c.def("set_limits", [](Program& p, int max_tokens, int max_rows, int vocab, int positions, int num_pages, int page_size) {
    p.limits = {max_tokens, max_rows, vocab, positions, num_pages, page_size};
  });
  // Arrays of another type or order are refused, not converted.
  c.def("run", &run, nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(), nb::arg("slots").noconvert(),
        nb::arg("query_start").noconvert(), nb::arg("context_len").noconvert(), nb::arg("page_table").noconvert(),
        nb::arg("logit_rows").noconvert());
  // The same by addresses and without any check, for tests and measurements of single ops.
  c.def(
      "run",
      [](Program& p, Address token_ids, Address positions, Address slots, Address query_start, Address context_len,
         Address page_table, Address logit_rows, int T, int S, int P, int L, int page_size) {
        p.run(Batch{at<int32_t>(token_ids), at<int32_t>(positions), at<int32_t>(slots), at<int32_t>(query_start),
                    at<int32_t>(context_len), at<int32_t>(page_table), at<int32_t>(logit_rows), T, S, P, L, page_size});
      },
      nb::call_guard<nb::gil_scoped_release>());
}

void sample(Pool& pool, const std::string& isa, Address logits, int64_t stride, int num_rows, int vocab, Address temperature,
            Address top_p, Address min_p, Address top_k, Address uniform, Address token, Address num_top, int top_stride,
            Address logprob, Address rank, Address top_ids, Address top_logprobs) {
  struct Call {
    SampleArgs args;
    decltype(OpTable::sample) kernel;
    static void run(const void* self, const Batch&, const Worker& worker) {
      const auto& call = *static_cast<const Call*>(self);
      call.kernel(call.args, worker);
    }
  };
  const Call call{{at<const float>(logits), stride, num_rows, vocab, at<float>(temperature), at<float>(top_p), at<float>(min_p),
                   at<int32_t>(top_k), at<double>(uniform), at<int32_t>(token), at<int32_t>(num_top), top_stride,
                   at<float>(logprob), at<int32_t>(rank), at<int32_t>(top_ids), at<float>(top_logprobs)},
                  kernels_or_throw(isa)->ops.sample};
  pool.reserve_scratch(kernels_or_throw(isa)->ops.sample_scratch_bytes(vocab));
  const Job job{&Call::run, &call};
  nb::gil_scoped_release released;
  pool.run(&job, 1, Batch{}, nullptr);
}

using Plan = nb::ndarray<const int32_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using StepArrays = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void bind_step_arrays(nb::module_& m) {
  nb::class_<TableColumns>(m, "TableColumns")
      .def("__init__", [](TableColumns* self, Address tokens, Address pages, Address num_tokens, Address num_pages,
                          int64_t token_stride, int64_t page_stride, int64_t max_rows, int64_t page_size) {
        new (self) TableColumns{at<int32_t>(tokens), at<int32_t>(pages), at<int32_t>(num_tokens), at<int32_t>(num_pages),
                                token_stride, page_stride, max_rows, page_size};
      });
  m.def("step_sizes", [](const TableColumns& table, const Plan& plan) {
    std::string error;
    const auto rows = static_cast<int64_t>(plan.shape(0));
    const StepSizes sizes = step_sizes(table, reinterpret_cast<const PlanRow*>(plan.data()), rows, error);
    if (!error.empty()) throw std::invalid_argument(error);
    return std::make_tuple(sizes.tokens, sizes.logits, sizes.pages);
  });
  m.def("fill_step", [](const TableColumns& table, const Plan& plan, int64_t tokens, int64_t logits, int64_t pages,
                        const StepArrays& out) {
    const auto rows = static_cast<int64_t>(plan.shape(0));
    if (static_cast<int64_t>(out.shape(0)) != 3 * tokens + 4 * rows + 2 + rows * pages + logits)
      throw std::invalid_argument("the output has another size than this step's arrays");
    fill_step(table, reinterpret_cast<const PlanRow*>(plan.data()), rows, {tokens, logits, pages}, out.data());
  });
}

// Seconds that all workers take to read a block once, in order: what weights at one row can reach at best.
double read_seconds(Pool& pool, const Block& block) {
  struct Read {
    const uint64_t* data;
    int64_t words;
    std::atomic<uint64_t> sum{0};
    static void call(const void* self, const Batch&, const Worker& worker) {
      auto& read = *static_cast<Read*>(const_cast<void*>(self));
      constexpr int64_t kChunk = 1 << 16;
      uint64_t sum = 0;
      for_shares(worker, read.words, kChunk, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; ++i) sum += read.data[i];
      });
      read.sum += sum;
    }
  } read{reinterpret_cast<const uint64_t*>(block.data()), static_cast<int64_t>(block.bytes() / 8)};
  const Job job{&Read::call, &read};
  int64_t stamps[2];
  nb::gil_scoped_release released;
  pool.run(&job, 1, Batch{}, stamps);
  return static_cast<double>(stamps[1] - stamps[0]) * 1e-9;
}

}  // namespace

NB_MODULE(_native, m) {
  // What is alive when the interpreter ends is no leak of ours: Python neither unwinds the frames of daemon threads nor
  // collects what gc.freeze has put aside. That objects end with their last holder is tested (tests/native/test_endings.py).
  nb::set_leak_warnings(false);
  m.def("isas", &isas);
  m.def("usable_cores", &usable_cores);
  bind_memory(m);
  bind_weight(m);
  bind_program(m);
  m.def("sample", &sample);
  bind_step_arrays(m);
  m.def("read_seconds", &read_seconds);
}
